"""The colocated loop of `examples/`: an engine and a captured trainer that take turns on one device."""

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from engine.conftest import TinyModel, prompts_of
from engine.test_sleep import graphs_of
from ostinato import LLM, SamplingParams

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl_colocated.py"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_shared_weights_are_those_that_graphs_read(tiny: TinyModel) -> None:
    with LLM(tiny.directory, max_model_len=128, max_running_requests=4, progress=False) as llm:
        prompts = prompts_of((9, 40))
        before = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
        graphs, weights = graphs_of(llm), llm.shared_weights()
        assert weights.keys() >= set(dict(tiny.reference.named_parameters()))
        for name, parameter in tiny.reference.named_parameters():
            assert torch.equal(weights[name], parameter)
        name = "model.layers.0.self_attn.k_proj.weight"
        trained = torch.nn.Parameter(weights[name])
        (trained * trained).sum().backward()
        with torch.no_grad():
            trained -= 3 * trained.grad
        report = llm.update_weights({})
        assert (report.num_bytes, llm.weight_version) == (0, "1")
        outputs = llm.generate(prompts, GREEDY)
        after = [output.outputs[0].token_ids for output in outputs]
        assert not any(output.num_cached_tokens for output in outputs), "KV of the old weights"
        assert all(one is two for one, two in zip(graphs_of(llm), graphs, strict=True))
        with torch.no_grad():
            trained /= -5  # what the step made of it
        llm.update_weights({})
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == before != after


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rl_colocated", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rl_colocated"] = module
    spec.loader.exec_module(module)
    return module


def cycles(**given: Any) -> dict[str, Any]:
    settings = {"device": "cpu", "shape": "tiny", "cycles": 10, "seed": 0, "compare": True}
    flags = {"frozen": False, "share_weights": False, "tear_down": False}
    found: dict[str, Any] = example().run(argparse.Namespace(**settings | flags | given))
    return found


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--cycles", "0"], "--cycles must be at least 1"),
        (["--json", "/no/such/folder/rl.json"], "there is no folder /no/such/folder for rl.json"),
    ],
)
def test_a_command_that_cannot_end_well_is_refused_at_once(
    given: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *given])
    with pytest.raises(SystemExit):
        example().main()
    assert text in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_reward_rises_over_seeds_and_nothing_is_captured_again() -> None:
    frozen = cycles(frozen=True)
    for seed in (0, 1, 2):
        loop = cycles(seed=seed)
        rewards = [cycle["reward"] for cycle in loop["cycles"]]
        still = [cycle["reward"] for cycle in frozen["cycles"]]
        assert sum(rewards[-3:]) / 3 > max(still) + 0.15
        beside = loop["beside_a_new_engine"]
        assert beside["equal_answers"] == beside["answers"] > 0
        assert loop["cycles_that_captured_again"] == 0
        for kind in ("engine", "training"):
            assert all(cycle[f"{kind}_graphs"] > 0 for cycle in loop["cycles"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_shared_weights_and_new_engines_learn_the_same() -> None:
    plain, shared, torn = (
        cycles(cycles=4, **how) for how in ({}, {"share_weights": True}, {"tear_down": True})
    )
    rewards = [[cycle["reward"] for cycle in loop["cycles"]] for loop in (plain, shared, torn)]
    assert rewards[0] == rewards[1] == rewards[2]
    assert shared["beside_a_new_engine"]["equal_answers"] == shared["beside_a_new_engine"]["answers"]
    assert torn["cycles_that_captured_again"] == 3
