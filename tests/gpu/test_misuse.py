"""Misuse again on CUDA, where a step is under way on the device whenever something ends a call."""

from engine.conftest import shallow, tiny_text  # noqa: F401
from engine.test_misuse_async import (
    llm as async_llm,
)
from engine.test_misuse_async import (
    test_a_step_that_fails_by_a_bug_ends_its_requests_and_the_engine_serves_on as _by_a_bug,
)
from engine.test_misuse_async import (
    test_a_storm_of_cancellations as _cancellations,
)
from engine.test_misuse_calls import (
    llm,  # noqa: F401
    test_a_forked_child_is_told_at_once,  # noqa: F401
    test_an_exception_where_a_text_is_made_ends_its_step_only,  # noqa: F401
    test_threads_are_served_side_by_side,  # noqa: F401
    test_two_engines_in_a_process,  # noqa: F401
)
from engine.test_misuse_interrupts import (
    test_a_storm_of_interrupts,  # noqa: F401
    test_interrupts_at_random_moments,  # noqa: F401
    test_many_interrupts_at_random_moments,  # noqa: F401
)

__all__ = ["async_llm"]


def test_a_storm_of_cancellations(async_llm, tiny_text):  # noqa: F811
    _cancellations(async_llm, tiny_text)


def test_a_step_that_fails_by_a_bug(async_llm, tiny_text, monkeypatch):  # noqa: F811
    _by_a_bug(async_llm, tiny_text, monkeypatch)
