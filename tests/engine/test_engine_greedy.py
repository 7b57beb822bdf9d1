"""Greedy output equals that of transformers, token for token, however the work is cut up and run."""

from pathlib import Path
from typing import Any

import pytest

from ostinato.engine.llm import LLM
from ostinato.engine.sampling_params import SamplingParams

from .conftest import TinyModel, prompts_of

LENGTHS = (3, 21, 1, 40, 17)
TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)
SMALL: dict[str, Any] = {
    "max_model_len": 64,
    "max_running_requests": 4,
    "chunked_prefill_size": 16,
    "cuda_graph_prefill_tokens": [8, 16],
    "num_pages": 40,
    "enable_cudagraph_gc": True,  # freezing it collects first, which takes longer than these captures
}
MODES = {
    # mode: replayed modes, eager reasons
    "none": (set(), {"disabled"}),
    "piecewise": ({"piecewise"}, set()),
    "full": ({"full"}, set()),
    "full-decode-only": ({"full"}, {"mixed-batch"}),
    "full-and-piecewise": ({"full", "piecewise"}, set()),
}


def served(llm: LLM) -> tuple[set[str], set[str]]:
    """Modes that were replayed, and reasons of eager steps."""
    report = llm.graph_report()
    assert not report.failures
    return {row.mode for row in report.graphs if row.replays}, set(report.eager_steps)


def assert_right(llm: LLM, model: TinyModel, prompts: list[dict[str, list[int]]], **how: Any) -> None:
    outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.error is None
        assert output.prompt_token_ids == prompt["prompt_token_ids"]
        assert output.outputs[0].token_ids == model.greedy(tuple(prompt["prompt_token_ids"]), TOKENS), how
        assert output.outputs[0].finish_reason == "length"
    assert_all_back(llm)


def assert_all_back(llm: LLM) -> None:
    scheduler = llm.engine.core.scheduler
    assert not scheduler.has_work
    assert not llm.engine.has_work
    scheduler.check_integrity()
    assert scheduler.pages.num_free == scheduler.pages.num_usable
    runner = llm.engine.core.runner
    assert not runner.page_table[0].any()
    assert runner.last_tokens[0] == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
def test_every_mode_batched_and_one_by_one(tiny: TinyModel, mode: str, chunked: bool) -> None:
    options = {**SMALL, "enable_chunked_prefill": chunked}
    if not chunked:
        options["cuda_graph_prefill_tokens"] = [16, 64]
    with LLM(tiny.directory, cuda_graph_mode=mode, **options) as llm:
        prompts = prompts_of(LENGTHS)
        assert_right(llm, tiny, prompts, batched=True)
        replayed, reasons = served(llm)
        assert (replayed, reasons) == MODES[mode]
        # The same prompts again: their full pages are found in the prefix cache.
        for prompt in prompts:
            [output] = llm.generate([prompt], GREEDY)
            assert output.outputs[0].token_ids == tiny.greedy(tuple(prompt["prompt_token_ids"]), TOKENS)
            assert output.num_cached_tokens == (len(prompt["prompt_token_ids"]) - 1) // 16 * 16
        assert_all_back(llm)
        assert served(llm) == MODES[mode]
        assert llm.engine.core.sampler is not None
        assert set(llm.sampling_report().eager_steps) == ({"disabled"} if mode == "none" else set())


@pytest.mark.parametrize(
    ("mode", "ahead", "caching"),
    [
        ("none", 0, True),
        ("full", 1, False),
        ("full", 0, True),
        ("full-and-piecewise", 0, False),
        ("full-and-piecewise", 1, True),
    ],
)
def test_preemption_changes_nothing(tiny: TinyModel, mode: str, ahead: int, caching: bool) -> None:
    few = {**SMALL, "num_pages": 7, "steps_ahead": ahead, "enable_prefix_caching": caching}
    with LLM(tiny.directory, cuda_graph_mode=mode, **few) as llm:
        assert_right(llm, tiny, prompts_of((30, 28, 31, 14, 29), seed=8))
        assert llm.engine.core.scheduler.num_preemptions > 0
        assert served(llm)[1] == MODES[mode][1]


@pytest.mark.parametrize("mode", MODES)
def test_one_step_ahead(tiny: TinyModel, mode: str) -> None:
    with LLM(tiny.directory, cuda_graph_mode=mode, steps_ahead=1, **SMALL) as llm:
        assert_right(llm, tiny, prompts_of(LENGTHS))
        assert served(llm) == MODES[mode]


def test_prefix_hits_can_be_turned_off(tiny: TinyModel) -> None:
    with LLM(tiny.directory, enable_prefix_caching=False, **SMALL) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts_of((40,)), GREEDY)
            assert outputs[0].num_cached_tokens == 0


def test_padded_decode_counts_its_padding(tiny: TinyModel) -> None:
    options = {**SMALL, "cuda_graph_bs": [4]}
    with LLM(tiny.directory, cuda_graph_mode="full-decode-only", **options) as llm:
        assert_right(llm, tiny, prompts_of((5, 6, 4)))
        [decode] = [row for row in llm.graph_report().graphs if row.num_tokens == 4]
        assert decode.replays == TOKENS - 1
        assert decode.padding_waste == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ({"disable_cuda_graph": True}, {"disabled"}),
        ({"cuda_graph_mode": "full-decode-only", "cuda_graph_max_bs": 2}, {"mixed-batch", "larger-than-max"}),
        ({"cuda_graph_max_bs": 2}, set()),
        (
            {"cuda_graph_mode": "full-decode-only", "cuda_graph_bs": [4], "disable_cuda_graph_padding": True},
            {"mixed-batch", "padding-disabled"},
        ),
    ],
)
def test_what_has_no_graph_runs_eagerly_and_says_why(
    tiny: TinyModel, options: dict[str, Any], reasons: set[str]
) -> None:
    with LLM(tiny.directory, **SMALL, **options) as llm:
        assert_right(llm, tiny, prompts_of((5, 6, 7)))
        assert served(llm)[1] == reasons


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("Mistral", {"sliding_window": 9}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {"head_dim": 16}),
    ],
)
def test_families(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    model = TinyModel(tmp_path, family, **fields)
    for mode in ("full", "full-and-piecewise"):
        with LLM(model.directory, cuda_graph_mode=mode, **SMALL) as llm:
            assert_right(llm, model, prompts_of(LENGTHS))
            assert served(llm) == MODES[mode]


def test_a_prompt_many_times_the_ladder_has_no_eager_step(tiny: TinyModel) -> None:
    options = {**SMALL, "max_model_len": 128}
    with LLM(tiny.directory, **options) as llm:
        assert_right(llm, tiny, prompts_of((100,)))
        assert llm.graph_report().eager_steps == {}
