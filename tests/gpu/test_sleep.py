"""An engine on CUDA that sleeps and wakes: the device gets its memory back, the graphs stay and are right."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.conftest import TinyModel, prompts_of
from engine.test_sleep import *  # noqa: F403
from engine.test_sleep import OPTIONS, graphs_of
from memory.known_numbers import free_bytes, leave_garbage
from ostinato import LLM, SamplingParams
from ostinato.memory import SaverMemoryError
from ostinato.models.weights import checkpoint_tensors

pytest.importorskip("cuda.bindings.driver")

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
MIB = 1 << 20

# Contents that spoil a step end a CUDA context with it; resident memory is the host's.
del test_contents_in_the_wrong_class_are_found_by_wrong_tokens  # noqa: F821
del test_the_process_gives_back_what_the_report_says  # noqa: F821


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    pytest.importorskip("transformers")
    return TinyModel(tmp_path_factory.mktemp("llama"), "Llama")


CYCLES = 20
PROMPTS = prompts_of((7, 300, 33, 1200, 64, 3), vocabulary=100_000)
ASKED = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.8, repetition_penalty=1.2, seed=6, max_tokens=12, ignore_eos=True),
] * 2
Said = tuple[list[list[int]], list[list[int]]]


def said(engine: LLM) -> Said:
    """Everything sampled and filtered that has a graph of its own; and once more, from cached prefixes."""
    first, again = (engine.generate(PROMPTS, ASKED, use_tqdm=False) for _ in range(2))
    assert not any(output.num_cached_tokens for output in first), "prefixes of other weights"
    assert [bool(output.num_cached_tokens) for output in again] == [False, True, True, True, True, False]
    return tuple([[output.outputs[0].token_ids for output in outputs] for outputs in (first, again)])


def copied_weights(engine: LLM) -> dict[str, torch.Tensor]:
    return {name: view.clone() for name, view in checkpoint_tensors(engine.engine.core.loaded.model).items()}


def assert_right_after_many_sleeps(
    engine: LLM, weights: dict[int, dict[str, torch.Tensor]], wanted: dict[int, Said], device: torch.device
) -> None:
    """Sleep, garbage in 95% of what came free, wake, other weights: answers, graphs and bytes are right."""
    assert wanted[1] != wanted[2]
    graphs = graphs_of(engine)
    report = engine.memory_report()
    ours = sum(report[name] for name in ("weights", "kv", "inputs", "outputs", "sampling", "activations"))
    leave_garbage(device, MIB)
    engine.sleep()
    engine.wake_up()
    start = free_bytes(device)
    for cycle in range(CYCLES):
        before = free_bytes(device)
        report = engine.sleep(level=1 + cycle % 2)
        came_free = free_bytes(device) - before
        assert came_free >= 0.95 * ours, f"{came_free:,} of {ours:,} came free"
        # The driver's tables of pinned memory, eight bytes a page of 4 KiB, come and go with backups.
        assert abs(came_free - report.released) <= 16 * MIB + ours // 512
        leave_garbage(device, int(0.95 * came_free))
        engine.wake_up()
        new = 1 + cycle // 2 % 2
        assert engine.update_weights(weights[new]).missing == 0
        assert said(engine) == wanted[new], f"after {cycle + 1} sleeps"
    assert abs(free_bytes(device) - start) <= 32 * MIB, "it grows"
    assert all(one is other for one, other in zip(graphs_of(engine), graphs, strict=True))
    weights.clear()
    report = engine.sleep()
    taken = torch.cuda.mem_get_info(device)[1] - free_bytes(device)
    assert sum(report.stays.values()) == pytest.approx(taken, rel=0.02)


def options_of(mode: str) -> dict[str, Any]:
    few = {"cuda_graph_bs": (1, 2, 8), "cuda_graph_prefill_tokens": (64, 512, 2048)}
    size = {"num_pages": 2000, "max_model_len": 4096}
    return {"load_format": "dummy", "progress": False, "cuda_graph_mode": mode, **size, **few}


ASLEEP = {"enable_sleep_mode": True, "hostile_wake": True}


@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "mode"),
    [
        ("qwen3-0.6b", "full"),
        ("qwen3-0.6b", "full-and-piecewise"),
        ("llama-3.1-8b", "full-and-piecewise"),
    ],
)
def test_a_real_shape_sleeps_twenty_times_and_says_what_fresh_engines_say(device, model, mode):
    """Random weights, other ones after every wake; engines that were started with them say the same."""
    wanted, weights = {}, {}
    for seed in (1, 2):
        with LLM(str(MODELS / model), seed=seed, **options_of(mode)) as fresh:
            wanted[seed], weights[seed] = said(fresh), copied_weights(fresh)
    with LLM(str(MODELS / model), **options_of(mode), **ASLEEP) as engine:
        assert_right_after_many_sleeps(engine, weights, wanted, device)


@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["piecewise", "full-decode-only", "none"])
def test_in_other_modes_it_says_what_it_said_before_the_first_sleep(device, mode):
    with LLM(str(MODELS / "qwen3-0.6b"), **options_of(mode), **ASLEEP) as engine:
        weights = {1: copied_weights(engine)}
        # As large as they were, so that nothing vanishes in the noise of a layer, and all in other places.
        weights[2] = {name: weight.roll(1, 0) for name, weight in weights[1].items()}
        wanted = {}
        for number, each in weights.items():
            engine.update_weights(each)
            wanted[number] = said(engine)
        assert_right_after_many_sleeps(engine, weights, wanted, device)


@pytest.mark.alone
def test_too_little_memory_at_wake_leaves_it_asleep_and_a_retry_works(device, tiny):
    with LLM(tiny.directory, **{**OPTIONS, "num_pages": 300_000}) as engine:
        params = SamplingParams(temperature=0, max_tokens=8)
        wanted = engine.generate(prompts_of((5, 20)), params)
        released = engine.sleep().released
        assert released > 1024 * MIB
        hog = torch.empty(free_bytes(device) - released // 2, dtype=torch.uint8, device=device)
        with pytest.raises(SaverMemoryError, match="are free"):
            engine.wake_up()
        assert engine.is_sleeping()
        del hog
        engine.wake_up()
        again = engine.generate(prompts_of((5, 20)), params)
        assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in wanted]


@pytest.mark.alone
def test_a_closed_engine_leaves_nothing_behind(device, tiny):
    def once():
        with LLM(tiny.directory, **{**OPTIONS, "num_pages": 100_000}) as engine:
            engine.generate(prompts_of((5, 20)), SamplingParams(temperature=0, max_tokens=8))
            engine.sleep()
            engine.wake_up()
        gc.collect()

    once()
    before = free_bytes(device)
    for _ in range(3):
        once()
    assert abs(free_bytes(device) - before) <= 16 * MIB
