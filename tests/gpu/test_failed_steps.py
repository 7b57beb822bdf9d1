"""Steps that fail on CUDA, where a graph may have run, copies be under way and rows be moved on by then."""

import pytest

pytest.importorskip("xgrammar")

from engine.test_failed_steps import (
    model,  # noqa: F401
    test_whatever_line_fails_where_a_step_lands_all_others_get_their_tokens,  # noqa: F401
    test_whatever_line_of_a_launch_fails_all_others_get_their_tokens,  # noqa: F401
    test_whatever_line_of_the_scheduler_fails_all_end_and_the_next_are_served,  # noqa: F401
)
