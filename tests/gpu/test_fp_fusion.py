"""Whatever an engine launches in Triton has been told whether to fuse."""

from typing import Any

import pytest

from engine.conftest import TinyModel, prompts_of
from engine.expected_steps import Setup
from ostinato import LLM, SamplingParams


def test_nothing_is_left_to_triton(tmp_path, monkeypatch, device):
    triton = pytest.importorskip("triton")
    pytest.importorskip("transformers")
    model = TinyModel(tmp_path, "Llama")
    launch = triton.runtime.JITFunction.run
    launched: dict[str, bool] = {}

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        name = self.fn.__name__
        launched[name] = launched.get(name, True) and "enable_fp_fusion" in options
        return launch(self, *args, **options)

    monkeypatch.setattr(triton.runtime.JITFunction, "run", noted)
    setup = Setup(token_rungs=(8, 16, 32), budget=32, length=128, pages=64, ahead=1)
    kinds = [{}, {"top_p": 0.9, "temperature": 1.0, "seed": 1}, {"logprobs": 2, "frequency_penalty": 0.5}]
    with LLM(model.directory, device="cuda", dtype="bfloat16", **setup.options) as llm:
        params = [SamplingParams(max_tokens=4, **kind) for kind in kinds]
        llm.generate(prompts_of((40, 5, 9)), params)
    assert launched
    assert [name for name, is_told in launched.items() if not is_told] == []
