"""Prompts beside streams keep to a time between two tokens, on CUDA: tokens, and costs by its clock."""

import time
from pathlib import Path

import numpy as np
import pytest

from engine.conftest import tiny  # noqa: F401
from engine.test_target_itl import (  # noqa: F401
    test_tokens_are_those_without_a_target_in_every_mode,
    test_with_adapters_beside,
    test_with_drafts_beside,
)
from ostinato import LLM, SamplingParams

MODEL = Path(__file__).parents[2] / "benchmarks" / "models" / "qwen3-0.6b"
TARGET_MS = 6.0


@pytest.mark.alone
@pytest.mark.parametrize("steps_ahead", [1, 0])
def test_streams_wait_about_as_long_as_asked(steps_ahead: int) -> None:
    """Full steps of Qwen3-0.6B take about 10 ms on an H200, and more behind long contexts."""
    options = {"max_model_len": 16_384, "enable_prefix_caching": False, "steps_ahead": steps_ahead}
    with LLM(str(MODEL), load_format="dummy", target_itl_ms=TARGET_MS, **options) as llm:
        engine, bound = llm.engine, llm.engine.core.prompt_bound
        assert bound is not None
        endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        streams = [engine.add({"prompt_token_ids": [at + 1] * 64}, endless) for at in range(8)]
        short = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        gaps: list[float] = []
        # The first of three prompts teaches what steps cost.
        for number in range(3):
            before = [len(stream.outputs[0].token_ids) for stream in streams]
            while min(len(stream.outputs[0].token_ids) for stream in streams) < max(before) + 8:
                engine.step()
            prompt = engine.add({"prompt_token_ids": [number + 9] * 12_288}, short)
            last = time.perf_counter()
            while not prompt.finished:
                engine.step()
                now = time.perf_counter()
                if number:
                    gaps.append((now - last) * 1e3)
                last = now
        each_step, each_token, each_pair, _ = bound.costs.coefficients
        predicted = float(bound.costs.seconds(np.array(2048), np.array(2048.0 * 8192), 1000))
        assert not llm.graph_report().eager_steps
    costs = f"a {each_step * 1e3:.2f} ms, b {each_token * 1e6:.2f} us, c {each_pair * 1e9:.2f} ns"
    print(f"{costs}; {len(gaps)} gaps, the longest {max(gaps):.1f} ms")
    assert len(gaps) > 2 * 12_288 / 4096 + 8, "as many steps as without a target"
    assert 1e-3 < predicted < 50e-3
    assert float(np.percentile(gaps, 90)) < 1.5 * TARGET_MS
