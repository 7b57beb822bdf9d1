"""An engine whose weights and KV cache lie in arenas of somebody's own."""

import functools
from typing import Any

import pytest
import torch

from models.arena import Arena
from ostinato.engine import text_engine
from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams

from .conftest import prompts_of
from .test_engine_greedy import SMALL


def test_weights_and_kv_cache_lie_in_arenas_by_tag(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arenas = {"weights": Arena(1 << 20), "kv_cache": Arena(1 << 20)}

    def allocate(tag: str, device: torch.device) -> Any:
        assert device.type == "cpu"
        return arenas[tag].allocate

    prompts, greedy = prompts_of((3, 21, 40)), SamplingParams(temperature=0, max_tokens=8)
    monkeypatch.setattr(text_engine, "place", functools.partial(text_engine.place, arenas=allocate))
    with LLM(tiny.directory, progress=False, dtype="float32", **SMALL) as llm:
        runner = llm.engine.core.runner
        assert sorted(arenas["weights"].asked) == sorted(name for name, _ in runner.model.named_parameters())
        assert sorted(arenas["kv_cache"].asked) == sorted(runner.kv.named_tensors())
        assert all(map(arenas["weights"].holds, runner.model.parameters()))
        assert all(map(arenas["kv_cache"].holds, runner.kv.named_tensors().values()))
        outputs = llm.generate(prompts, greedy)
        assert not llm.graph_report().failures
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == tiny.greedy(tuple(prompt["prompt_token_ids"]), 8)
