"""Speculation beside adapters, cached prefixes, verification and options that it excludes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from engine.conftest import TinyModel, prompts_of
from engine.lora_world import LoraWorld
from engine.test_engine_greedy import assert_all_back
from ostinato import LLM, SamplingParams
from ostinato.engine.loading.load import ModelLoadError
from ostinato.engine.speculating.speculation import Speculation
from ostinato.graphs.errors import ConfigError, VerifyError

from .oracle import key_of, oracle_llm
from .test_speculation import SMALL

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "disable_adaptive": True}
LOOKUP = {**NGRAM, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.mark.slow
def test_adapters_on_the_target(tmp_path: Path) -> None:
    world = LoraWorld.make(tmp_path)
    prompts, numbers = prompts_of((5, 9, 3, 12)), [0, None, 1, 0]
    params = SamplingParams(temperature=0, max_tokens=12)
    options = {**SMALL, "cuda_graph_mode": "full", "steps_ahead": 1, "max_lora_rank": 8, "max_loras": 2}
    with oracle_llm(world.base.directory, 3, enable_lora=True, **options) as (llm, oracle):
        for prompt, number in zip(prompts, numbers, strict=True):
            text = world.expected(number, prompt, 12)
            oracle.known[key_of(prompt["prompt_token_ids"], params)] = [*text[:5], 0, *text[6:]]
        world.check(llm, prompts, numbers, 12)
        report = llm.speculation_report()
        assert report is not None
        assert 0 < report.drafts.num_accepted_tokens < report.drafts.num_draft_tokens
        assert not llm.graph_report().eager_steps
        assert_all_back(llm)


def test_drafts_are_found_in_a_prefix_that_no_step_computed(tiny: TinyModel) -> None:
    """The text of cached pages is known to the drafter as well."""
    options = {**SMALL, "cuda_graph_mode": "full", "steps_ahead": 1}
    # A text that says what will come: the model's own continuation stands in the prompt.
    start = prompts_of((5,))[0]["prompt_token_ids"]
    follows = tiny.greedy(tuple(start), 20)
    params = SamplingParams(temperature=0, max_tokens=6)
    with (
        LLM(tiny.directory, speculative_config=LOOKUP, **options) as llm,
        LLM(tiny.directory, **options) as plain,
    ):
        core = llm.engine.core
        prompt = {"prompt_token_ids": [*start, *follows, *follows[:1]]}
        expected = plain.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        for is_cached in (False, True):
            output = llm.generate(prompt, params, use_tqdm=False)[0]
            assert output.outputs[0].token_ids == expected
            assert (output.num_cached_tokens > 0) == is_cached
            assert core.runner.speculation is not None
            # Whatever row it had, its text is there up to where it ended.
            history = core.runner.rows["history"].tolist()
            text = [*prompt["prompt_token_ids"], *expected[:-1]]
            assert any(row[: len(text)] == text for row in history)
            core.runner.rows["history"].zero_()


@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_draft_misses_nothing_by_steps_without_drafts(shallow: TinyModel, ahead: int) -> None:
    """One that is the model itself is right about every token, whoever else's prompts come in between."""
    asked = {"method": "draft_model", "model": shallow.directory, "num_speculative_tokens": 3}
    options = {**SMALL, "cuda_graph_mode": "full", "steps_ahead": ahead, "max_running_requests": 2}
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (50, 6, 1, 3, 5, 9, 2, 7)]
    with LLM(shallow.directory, speculative_config={**asked, "disable_adaptive": True}, **options) as llm:
        outputs = llm.generate(prompts_of((4, 3, 5, 17, 2, 1, 6, 9)), params, use_tqdm=False)
        found = outputs[0].metrics.speculative_decoding
        assert found.num_accepted_tokens == found.num_draft_tokens > 30
        # Texts that end with all drafts accepted and a full page; what follows finds that page.
        for length, count in ((4, 13), (8, 9)):
            start = prompts_of((length,), seed=count)[0]["prompt_token_ids"]
            first = llm.generate(start, SamplingParams(temperature=0, max_tokens=count), use_tqdm=False)[0]
            llm.generate([*start, *first.outputs[0].token_ids, 7], params[3], use_tqdm=False)
        report = llm.speculation_report()
        assert report is not None
        assert report.drafts.acceptance_rate == 1
        runner, pages = llm.engine.core.runner, llm.engine.core.scheduler.pages
        assert runner.draft is not None
        assert pages.num_cached > 5
        for of_model, of_draft in zip(runner.kv.layer(0), runner.draft.kv.layer(0), strict=True):
            torch.testing.assert_close(of_draft[pages._is_cached], of_model[pages._is_cached])
        assert_all_back(llm)


def test_verification_looks_at_steps_with_drafts(tiny: TinyModel) -> None:
    options = {**SMALL, "cuda_graph_mode": "full", "max_running_requests": 2}
    with LLM(tiny.directory, speculative_config=NGRAM, **options) as llm:
        found = llm.verify(progress=False)
        found.raise_if_failed()
        names = {check.graph for check in found.checks}
        assert {name.split()[2] for name in names if name.startswith("full decode")} >= {"2x4", "1x4"}
        report = llm.speculation_report()
        assert report is not None
        assert not report.single_requests

    right = Speculation.accept

    def wrong(self: Speculation, logits: Tensor, req_rows: Tensor, *rest: Any) -> None:
        right(self, logits, req_rows, *rest)
        self.state.lengths.index_add_(0, req_rows.long(), (req_rows != 0).int())

    with (
        patch.object(Speculation, "accept", wrong),
        LLM(tiny.directory, speculative_config=NGRAM, **options) as llm,
        pytest.raises(VerifyError, match=r"2 of 1\d graphs are wrong .*\n.*2x4.*lengths.*\n.*1x4.*lengths"),
    ):
        llm.verify(progress=False)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batch_invariant": True}, "batch_invariant and speculative_config"),
        ({"enable_cascade_attention": True}, "enable_cascade_attention and speculative_config"),
        ({"speculative_config": {**NGRAM, "num_speculative_tokens": 0}}, "num_speculative_tokens"),
        ({"speculative_config": {**NGRAM, "num_speculative_tokens": 99}}, "num_speculative_tokens"),
        ({"speculative_config": {"method": "magic", "num_speculative_tokens": 1}}, "magic"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(
    tiny: TinyModel, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        LLM(tiny.directory, **{"speculative_config": NGRAM, **options})


def test_a_model_that_only_embeds_is_refused(tiny: TinyModel) -> None:
    with pytest.raises(ModelLoadError, match="LlamaModel has no output layer"):
        LLM(
            tiny.directory,
            speculative_config=NGRAM,
            hf_overrides={"architectures": ["LlamaModel"]},
            load_format="dummy",
        )


def test_a_step_that_fails_ends_its_requests_and_no_others(tiny: TinyModel) -> None:
    options = {**SMALL, "cuda_graph_mode": "full", "steps_ahead": 1}
    prompts, params = prompts_of((5, 9)), SamplingParams(temperature=0, max_tokens=12)
    expected = [tiny.greedy(tuple(prompt["prompt_token_ids"]), 12) for prompt in prompts]
    with oracle_llm(tiny.directory, 3, **options) as (llm, oracle):
        for prompt, text in zip(prompts, expected, strict=True):
            oracle.known[key_of(prompt["prompt_token_ids"], params)] = text
        speculation = llm.engine.core.runner.speculation
        for part in ("draft", "accepted"):
            counts = iter(range(100))
            launch = speculation.draft if part == "draft" else llm.engine.core.sampler.launch

            def failing(step: Any, launch: Any = launch, counts: Any = counts) -> Any:
                found = launch(step)
                if step.num_drafts and next(counts) == 1:
                    raise RuntimeError("planted")
                return found

            owner, name = (speculation, "draft") if part == "draft" else (llm.engine.core.sampler, "launch")
            with patch.object(owner, name, failing):
                outputs = llm.generate(prompts, params, use_tqdm=False)
            for output, text in zip(outputs, expected, strict=True):
                assert "planted" in (output.error or "")
                found = output.outputs[0].token_ids
                assert found == text[: len(found)]
                assert 1 < len(found) < 12
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            assert_all_back(llm)


def test_synthetic_acceptance_has_the_length_that_was_asked_for(tiny: TinyModel) -> None:
    rates = {**NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    with LLM(tiny.directory, speculative_config=rates, cuda_graph_mode="full", **SMALL) as llm:
        params = [SamplingParams(temperature=0, max_tokens=50, seed=seed) for seed in range(8)]
        outputs = llm.generate(prompts_of((3,) * 8), params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == 50 for output in outputs)
        report = llm.speculation_report()
        assert report is not None
        assert report.drafts.mean_acceptance_length == pytest.approx(2.5, abs=0.15)


def test_a_schedule_by_size_of_batch(tiny: TinyModel) -> None:
    asked = {**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 4, 0]]}
    del asked["disable_adaptive"]
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(tiny.directory, speculative_config=asked, cuda_graph_mode="full", **SMALL) as llm:
        llm.generate(prompts_of((3, 3, 3, 3)), params, use_tqdm=False)
        report = llm.speculation_report()
        assert report is not None
        assert report.drafts.num_drafts == 0
        assert set(report.steps_without) == {"num_speculative_tokens_per_batch_size"}
        assert "steps without drafts: num_speculative_tokens_per_batch_size" in str(report)
        llm.generate(prompts_of((3, 3)), params, use_tqdm=False)
        report = llm.speculation_report()
        assert report is not None
        assert report.drafts.num_draft_tokens == 3 * report.drafts.num_drafts > 0
