"""Decode batches that read a shared prefix once: the same tokens, from graphs of their own."""

from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest

from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams
from ostinato.engine.stepping import shared_prefix
from ostinato.graphs import GraphKey

from .conftest import STEPS_AHEAD, TinyModel, prompts_of
from .test_engine_greedy import assert_all_back

LARGE = 3.0e4
TOKENS = 14
OPTIONS: dict[str, Any] = {
    "max_model_len": 112,  # one bucket of contexts; 128 have two
    "max_running_requests": 6,
    "chunked_prefill_size": 32,
    "cuda_graph_bs": (2, 4, 6),
    "cuda_graph_prefill_tokens": (8, 32),
    "num_pages": 80,
    "enable_cudagraph_gc": True,
    "enable_cascade_attention": True,
}


@pytest.fixture(autouse=True)
def _any_cascade_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "LEAST_REQUESTS", 2)
    monkeypatch.setattr(shared_prefix, "LEAST_SAVED_BYTES", 1)


def sharing(shared: int, own: Sequence[int], seed: int = 3) -> list[dict[str, list[int]]]:
    """Prompts that begin with the same `shared` tokens, and so many of their own."""
    [first, *rest] = prompts_of((shared, *own), seed=seed)
    return [{"prompt_token_ids": first["prompt_token_ids"] + one["prompt_token_ids"]} for one in rest]


def assert_tokens(
    llm: LLM, model: TinyModel, prompts: list[dict[str, list[int]]], tokens: int = TOKENS
) -> None:
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.error is None
        assert output.outputs[0].token_ids == model.greedy(tuple(prompt["prompt_token_ids"]), tokens)
    assert_all_back(llm)


def replays(llm: LLM) -> Counter[str]:
    """Of decode graphs that read a shared prefix once, of those that do not, and of others."""
    counts: Counter[str] = Counter()
    for row in llm.graph_report().graphs:
        kind = "cascade" if row.descriptor.endswith("cascade") else row.descriptor.split()[0]
        counts[kind] += row.replays
    return counts


def cascade_keys(llm: LLM) -> list[GraphKey]:
    return [key for key in llm.engine.core.runner.graphs.graphs if key.descriptor.cascade]


@pytest.mark.parametrize("ahead", STEPS_AHEAD)
@pytest.mark.parametrize("mode", ["full", "full-and-piecewise", "full-decode-only"])
def test_tokens_are_those_of_transformers_and_cascades_are_replayed(
    tiny: TinyModel, mode: str, ahead: int
) -> None:
    prompts = sharing(40, (3, 9, 1, 12, 5))
    options = {**OPTIONS, "max_model_len": 128}
    with LLM(tiny.directory, **options, cuda_graph_mode=mode, steps_ahead=ahead) as llm:
        assert_tokens(llm, tiny, prompts)
        first = replays(llm)
        assert first["cascade"] >= 6, "once all prompts are there"
        assert_tokens(llm, tiny, prompts)
        # Prompts are found in the cache now: nearly all decode steps are of all five.
        assert replays(llm)["cascade"] - first["cascade"] >= TOKENS - 3
        assert set(llm.graph_report().eager_steps) <= {"mixed-batch"}
        assert llm.graph_report().lowered is None


def test_without_the_option_there_is_no_cascade_graph(tiny: TinyModel) -> None:
    with LLM(tiny.directory, **{**OPTIONS, "enable_cascade_attention": False}) as llm:
        assert_tokens(llm, tiny, sharing(40, (3, 9, 1)))
        assert not cascade_keys(llm)


def test_small_batches_and_short_prefixes_stay_plain(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with LLM(tiny.directory, **OPTIONS) as llm:
        assert {key.descriptor.num_reqs for key in cascade_keys(llm)} == {4, 6}
        assert_tokens(llm, tiny, sharing(40, (3, 9, 1, 12)))
        assert not replays(llm)["cascade"]
        assert llm.graph_report().lowered is None


def test_a_stranger_makes_the_batch_plain_for_as_long_as_he_stays(tiny: TinyModel) -> None:
    prompts = sharing(40, (3, 9, 1))
    [stranger] = prompts_of((20,), seed=9)
    with LLM(tiny.directory, **OPTIONS) as llm:
        engine = llm.engine
        params = SamplingParams(temperature=0, max_tokens=25)
        outputs = [engine.add(prompt, params) for prompt in prompts]
        kinds = []
        late = None
        while engine.has_work:
            if len(outputs[0].outputs[0].token_ids) == 8 and late is None:
                late = engine.add(stranger, SamplingParams(temperature=0, max_tokens=6))
            before = replays(llm)
            engine.step()
            kinds += (replays(llm) - before).keys()
        assert late is not None
        assert late.outputs[0].token_ids == tiny.greedy(tuple(stranger["prompt_token_ids"]), 6)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.outputs[0].token_ids == tiny.greedy(tuple(prompt["prompt_token_ids"]), 25)
        changes = [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]
        # Prompts, shared; the stranger's prompt, with him; shared until but one has ended.
        text = " ".join(changes)
        assert "cascade mixed decode cascade" in text, text


def test_preemption_changes_nothing(tiny: TinyModel) -> None:
    prompts = sharing(40, (20, 18, 22, 19, 21))
    with LLM(tiny.directory, **{**OPTIONS, "num_pages": 12}) as llm:
        assert_tokens(llm, tiny, prompts, 30)
        assert llm.engine.core.scheduler.num_preemptions > 0
        assert replays(llm)["cascade"]


def test_without_prefix_caching_nothing_is_shared(tiny: TinyModel) -> None:
    with LLM(tiny.directory, **OPTIONS, enable_prefix_caching=False) as llm:
        assert_tokens(llm, tiny, sharing(40, (3, 9, 1)))
        assert not replays(llm)["cascade"]
        assert llm.graph_report().lowered is None


def test_equal_prompts_share_what_they_go_on_to_say(tiny: TinyModel) -> None:
    """Greedy requests of one prompt fill equal pages, which become one: the prefix grows as they go on."""
    [prompt] = prompts_of((33,), seed=3)
    with LLM(tiny.directory, **OPTIONS) as llm:
        lengths = set()
        write = llm.engine.core.runner.rows.write_rows

        def noted(name: str, rows: Any, value: int) -> None:
            lengths.add(value)
            write(name, rows, value)

        with patch.object(llm.engine.core.runner.rows, "write_rows", noted):
            assert_tokens(llm, tiny, [prompt] * 4, 40)
        assert {32, 48, 64} <= lengths


def test_what_page_0_and_dead_outputs_hold_reaches_no_token(tiny: TinyModel) -> None:
    prompts = sharing(40, (3, 9, 1, 12, 5))
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    with LLM(tiny.directory, **OPTIONS) as llm:
        runner = llm.engine.core.runner
        runner.graphs.poison = True
        outputs = [llm.engine.add(prompt, params) for prompt in prompts]
        while llm.engine.has_work:
            for cache in (*runner.kv.k, *runner.kv.v):
                cache[0].fill_(LARGE)
            llm.engine.step()
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.outputs[0].token_ids == tiny.greedy(tuple(prompt["prompt_token_ids"]), TOKENS)
        assert replays(llm)["cascade"]
        assert runner.rows["prefix_lens"][0] == 0


def test_a_cascade_without_a_graph_runs_plain_and_is_counted(tiny: TinyModel) -> None:
    prompts = sharing(40, (3, 9, 1, 12, 5))
    with LLM(tiny.directory, **OPTIONS) as llm:
        for key in cascade_keys(llm):
            llm.engine.core.runner.graphs.drop(key)
        assert_tokens(llm, tiny, prompts)
        report = llm.graph_report()
        assert report.eager_steps == {}
        [(reason, count)] = llm.engine.core.runner.missed_cascades.items()
        assert (str(reason), count >= 6) == ("not-captured", True)
        assert report.lowered is not None
        assert f"not-captured {count}" in report.lowered
        assert report.lowered in str(report).replace("\n", "")


@pytest.mark.parametrize(("mode", "reason"), [("piecewise", "cascade-attention"), ("none", "disabled")])
def test_modes_without_full_graphs_say_why(tiny: TinyModel, mode: str, reason: str) -> None:
    with LLM(tiny.directory, **OPTIONS, cuda_graph_mode=mode) as llm:
        assert_tokens(llm, tiny, sharing(40, (3, 9, 1)))
        assert list(map(str, llm.engine.core.runner.missed_cascades)) == [reason]


def test_a_steady_step_brings_nothing_to_the_device(tiny: TinyModel) -> None:
    """One bucket of contexts, as on a GPU: all steps between two pages are reruns."""
    with LLM(tiny.directory, **OPTIONS) as llm:
        runner = llm.engine.core.runner
        assert_tokens(llm, tiny, sharing(48, (1, 2, 3)))
        runner._contexts = []
        for prompt in sharing(48, (1, 2, 3)):
            llm.engine.add(prompt, SamplingParams(temperature=0, max_tokens=11))
        for _ in range(3):
            llm.engine.step()
        before = replays(llm)["cascade"]
        with (
            patch.object(runner.graphs, "run", side_effect=AssertionError),
            patch.object(runner.rows.scatter, "run", side_effect=AssertionError),
        ):
            for _ in range(6):
                llm.engine.step()
        assert replays(llm)["cascade"] == before + 6
        while llm.engine.has_work:
            llm.engine.step()


def test_layers_with_a_window_attend_as_before(tmp_path: Any) -> None:
    model = TinyModel(tmp_path, "Mistral", sliding_window=24)
    with LLM(model.directory, **OPTIONS) as llm:
        assert_tokens(llm, model, sharing(40, (3, 9, 1)))
        assert not cascade_keys(llm), "all layers have one: there is nothing to read once"
        assert llm.graph_report().lowered is None
