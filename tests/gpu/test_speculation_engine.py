"""Speculation again on CUDA: the tokens of an engine without drafts, in every mode, and launches only."""

import pytest

from engine.conftest import tiny, tiny_text  # noqa: F401
from engine.speculating.test_speculation import *  # noqa: F403
from engine.speculating.test_steady_steps import (  # noqa: F401
    engine,
    events,
    test_a_steady_step_is_two_launches,
    test_reading_a_value_back_is_noticed,
)
from engine.speculating.test_with_everything_else import (  # noqa: F401
    test_a_step_that_fails_ends_its_requests_and_no_others,
    test_adapters_on_the_target,
    test_drafts_are_found_in_a_prefix_that_no_step_computed,
    test_synthetic_acceptance_has_the_length_that_was_asked_for,
    test_verification_looks_at_steps_with_drafts,
)
from ostinato import LLM, SamplingParams


@pytest.mark.alone
def test_the_device_hardly_waits(tiny):  # noqa: F811
    """Synthetic acceptance on a tiny model: the host is as far ahead as without drafts."""
    asked = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 3.0,
    }
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with LLM(tiny.directory, max_model_len=128, speculative_config=asked, progress=False) as llm:
        prompt = {"prompt_token_ids": [5, 9, 3]}
        llm.generate(prompt, params, use_tqdm=False)
        llm.step_times(reset=True)
        llm.generate(prompt, params, use_tqdm=False)
        times, report = llm.step_times(), llm.speculation_report()
        assert times.device_microseconds > 0, "steps were not timed: the drafter must note when they begin"
        assert report is not None
        assert report.chosen, "nothing was measured"
        print(report, times.idle_share)
