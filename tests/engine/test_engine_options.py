"""Options that change how steps run, and what users of other engines call them."""

from typing import Any

import pytest

from ostinato.engine.config import EngineConfig
from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams
from ostinato.graphs import ConfigError, GraphMode

from .conftest import TinyModel, prompts_of

SMALL: dict[str, Any] = {"max_model_len": 96, "max_running_requests": 6, "num_pages": 40}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_invariant": True, "disable_cuda_graph": True}, "it needs graphs"),
        ({"batch_invariant": True, "enable_cascade_attention": True}, "exclude each other"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_batch_invariant_gives_the_same_bits_alone_and_in_company(tiny: TinyModel) -> None:
    prompts = prompts_of((3, 30, 17, 1, 45, 9, 22, 60))
    params = [
        SamplingParams(temperature=0.7 * (at % 2), seed=at, max_tokens=6 + at, logprobs=3, ignore_eos=True)
        for at in range(len(prompts))
    ]
    with LLM(tiny.directory, batch_invariant=True, chunked_prefill_size=24, **SMALL) as llm:
        scheduler = llm.engine.core.scheduler
        together = llm.generate(prompts, params)
        alone = []
        for prompt, wanted in zip(prompts, params, strict=True):
            scheduler.flush_prefix_cache()
            alone += llm.generate(prompt, wanted)
        report = llm.graph_report()
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs, "bit for bit"
    assert report.mode == str(GraphMode.FULL)
    assert len(report.graphs) == 1
    assert report.eager_steps == {}


def test_without_it_bits_differ(tiny: TinyModel) -> None:
    """So that the test above proves something."""
    prompts = prompts_of((3, 30, 17, 1, 45, 9))
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True)
    with LLM(tiny.directory, chunked_prefill_size=24, enable_prefix_caching=False, **SMALL) as llm:
        together = llm.generate(prompts, params)
        alone = [llm.generate(prompt, params)[0] for prompt in prompts]
    pairs = zip(together, alone, strict=True)
    assert any(one.outputs[0].logprobs != other.outputs[0].logprobs for one, other in pairs)


def test_times_and_memory_are_told(tiny: TinyModel) -> None:
    with LLM(tiny.directory, **SMALL) as llm:
        startup = llm.startup_times()
        assert list(startup) == [
            "load",
            "kv",
            "capture prefill",
            "capture decode",
            "capture sampling",
            "total",
        ]
        assert all(seconds > 0 for seconds in startup.values())
        assert startup["total"] == pytest.approx(sum(list(startup.values())[:-1]))
        assert llm.step_times().steps == 0
        llm.generate(prompts_of((4,)), SamplingParams(temperature=0, max_tokens=5))
        times = llm.step_times(reset=True)
        assert times.steps == 5
        assert set(times.microseconds) == {"schedule", "launch", "wait", "complete", "deliver"}
        assert times.per_step("launch") > 0
        assert llm.step_times().steps == 0


def test_a_bar_over_the_prompts(tiny: TinyModel, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(tiny.directory, **SMALL) as llm:
        llm.generate(prompts_of((4, 5)), SamplingParams(temperature=0, max_tokens=3), use_tqdm=True)
        assert "2/2" in capsys.readouterr().err
        llm.generate(prompts_of((4, 5)), SamplingParams(temperature=0, max_tokens=3))
        assert capsys.readouterr().err == ""
