"""Which sizes are captured: ours, vLLM's and SGLang's options for it, and that they change nothing else."""

import logging
from typing import Any

import pytest
import torch

from ostinato.engine.config import EngineConfig
from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams
from ostinato.engine.resolved_config import ResolvedConfig, resolve
from ostinato.graphs import ConfigError, Ladder

from .conftest import TinyModel, prompts_of


def resolved(**options: Any) -> ResolvedConfig:
    return resolve(EngineConfig(device="cpu", **options), 4096, torch.float32)


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, **options: Any) -> ResolvedConfig:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return resolve(EngineConfig(**options), 8192, torch.bfloat16)


def test_capture_sizes_in_tokens_are_converted_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ostinato.engine"):
        config = resolved(cudagraph_capture_sizes=(64, 1, 2, 8, 2, 512), max_running_requests=8)
    assert list(config.decode_ladder) == [1, 2, 8]
    assert list(config.token_ladder) == [1, 2, 8, 64, 512]
    assert "became cuda_graph_bs 1,2,8 and cuda_graph_prefill_tokens 1,2,8,64,512" in caplog.text


def test_the_largest_capture_size_cuts_both_ladders() -> None:
    config = resolved(max_cudagraph_capture_size=24, max_running_requests=64)
    assert list(config.decode_ladder) == [1, 2, 4, 8, 16, 24]
    assert list(config.token_ladder) == [8, 16, 24]
    beyond = resolved(max_cudagraph_capture_size=100_000)
    assert (beyond.decode_ladder, beyond.token_ladder) == (resolved().decode_ladder, resolved().token_ladder)


@pytest.mark.parametrize(
    "sizes",
    [
        {"cudagraph_capture_sizes": (1, 2, 64)},
        {"cudagraph_capture_sizes": (1, 100_000)},
        {"max_cudagraph_capture_size": 64},
        {"max_cudagraph_capture_size": 100_000},
        {"cuda_graph_prefill_tokens": (16, 64)},
        {"cuda_graph_prefill_tokens": (100_000,)},
    ],
    ids=str,
)
def test_what_is_captured_does_not_change_how_prompts_are_cut(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any]
) -> None:
    for options in ({}, {"chunked_prefill_size": 77}, {"enable_chunked_prefill": False}):
        for decided in (resolved, lambda **given: on_a_gpu(monkeypatch, **given)):
            plain, cut = decided(**options), decided(**options, **sizes)
            assert cut.max_batched_tokens == plain.max_batched_tokens
            assert cut.max_running_requests == plain.max_running_requests


@pytest.mark.parametrize(
    "sizes",
    [
        {"cudagraph_capture_sizes": (1, 2, 8)},
        {"max_cudagraph_capture_size": 8},
        {"cuda_graph_prefill_tokens": (8,)},
    ],
    ids=str,
)
def test_steps_above_the_last_captured_size_run_without_a_graph(
    tiny: TinyModel, sizes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    options = {"max_model_len": 96, "max_running_requests": 2, "num_pages": 20, "chunked_prefill_size": 32}
    [prompt] = prompts_of((38,))
    params = SamplingParams(temperature=0, max_tokens=4)
    with caplog.at_level(logging.WARNING, "ostinato.engine"), LLM(tiny.directory, **options, **sizes) as llm:
        [output] = llm.generate(prompt, params)
        report = llm.graph_report()
    assert output.outputs[0].token_ids == tiny.greedy(tuple(prompt["prompt_token_ids"]), 4)
    # 32 tokens of the prompt at once, too many for a graph; then 6; then one at a time.
    assert report.eager_steps == {"larger-than-max": 1}
    assert report.replays == 4
    assert "up to 32 tokens (chunked_prefill_size) and graphs up to 8" in caplog.text


def test_nothing_is_said_where_every_step_has_a_graph_or_none_was_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "ostinato.engine"):
        resolved()
        resolved(chunked_prefill_size=64, cuda_graph_prefill_tokens=(16, 64))
        resolved(cuda_graph_mode="full-decode-only", cuda_graph_prefill_tokens=(16,))
        resolved(disable_cuda_graph=True, cuda_graph_prefill_tokens=(16,), cuda_graph_max_bs=512)
        resolved(cuda_graph_max_bs=16)
    assert caplog.text == ""


def test_a_largest_batch_beyond_the_running_requests_is_cut_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "ostinato.engine"):
        config = resolved(cuda_graph_max_bs=512, max_running_requests=12)
    assert config.decode_ladder.limit == 12
    assert "cuda_graph_max_bs 512" in caplog.text
    assert "max_running_requests is 12" in caplog.text


@pytest.mark.parametrize("name", ["sglang", "vllm", "dense"])
def test_the_default_decode_list_can_be_chosen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ladder = getattr(Ladder, name)
    assert resolved(cuda_graph_ladder=name, max_running_requests=100).decode_ladder == ladder(100)
    limited = resolved(cuda_graph_ladder=name, cuda_graph_max_bs=40, max_running_requests=100)
    assert limited.decode_ladder == ladder(40)
    theirs = resolved(cuda_graph_ladder=name, max_cudagraph_capture_size=24, max_running_requests=100)
    assert theirs.decode_ladder == ladder(24)
    assert on_a_gpu(monkeypatch, cuda_graph_ladder=name).decode_ladder == ladder(256)


def test_the_default_decode_list_is_sglangs_on_a_gpu_and_short_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert list(resolved(max_running_requests=20).decode_ladder) == [1, 2, 4, 8, 16, 20]
    assert on_a_gpu(monkeypatch).decode_ladder == Ladder.sglang(256)


@pytest.mark.parametrize("running", [64, 256, 512, 1000])
def test_every_decode_batch_that_can_run_has_a_graph(monkeypatch: pytest.MonkeyPatch, running: int) -> None:
    config = on_a_gpu(monkeypatch, max_running_requests=running)
    assert config.decode_ladder.limit == running


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cudagraph_capture_sizes": (1, 2), "cuda_graph_bs": (1,)}, "or cuda_graph_bs, not both"),
        ({"max_cudagraph_capture_size": 4, "cuda_graph_prefill_tokens": (8,)}, "not both"),
        ({"cudagraph_capture_sizes": (1,), "max_cudagraph_capture_size": 4}, "not both"),
        ({"max_cudagraph_capture_size": 0}, "use disable_cuda_graph"),
        ({"batch_invariant": True, "cuda_graph_bs": (1, 2)}, "remove cuda_graph_bs"),
        ({"batch_invariant": True, "cudagraph_capture_sizes": (1,)}, "remove cudagraph_capture_sizes"),
        ({"batch_invariant": True, "max_cudagraph_capture_size": 9}, "remove max_cudagraph_capture_size"),
        ({"batch_invariant": True, "cuda_graph_ladder": "dense"}, "remove cuda_graph_ladder"),
        (
            {"cuda_graph_ladder": "steep"},
            "unknown cuda_graph_ladder 'steep': use auto, sglang, vllm or dense",
        ),
        ({"cuda_graph_ladder": "dense", "cuda_graph_bs": (1, 2)}, "cuda_graph_ladder or cuda_graph_bs"),
        (
            {"cuda_graph_ladder": "dense", "cudagraph_capture_sizes": (1, 2)},
            "cuda_graph_ladder or cudagraph_capture_sizes",
        ),
    ],
    ids=str,
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_no_size_for_a_decode_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 4 requests run"):
        resolved(cudagraph_capture_sizes=(64,), max_running_requests=4)


@pytest.mark.parametrize("asked", [True, False])
def test_every_graph_is_logged_when_asked_for(
    tiny: TinyModel, caplog: pytest.LogCaptureFixture, asked: bool
) -> None:
    options = {
        "max_model_len": 64,
        "max_running_requests": 2,
        "num_pages": 20,
        "cuda_graph_prefill_tokens": (8,),
    }
    with (
        caplog.at_level(logging.INFO, "ostinato.graphs"),
        LLM(tiny.directory, cuda_graph_debug_log=asked, **options) as llm,
    ):
        captured = len(llm.graph_report().graphs) + len(llm.sampling_report().graphs)
    lines = [record.message for record in caplog.records if record.message.startswith("captured ")]
    assert sum("nodes=" in line for line in lines) == (captured if asked else 0)
