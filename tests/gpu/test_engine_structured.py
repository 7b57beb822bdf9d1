"""Requests under a grammar on CUDA, one step ahead."""

import pytest

pytest.importorskip("xgrammar")

from engine.conftest import tiny_text  # noqa: F401
from engine.test_engine_structured import (
    test_a_batch_with_a_grammar_in_it_is_steady,  # noqa: F401
    test_a_request_under_a_grammar_gets_a_token_in_every_step,  # noqa: F401
    test_a_row_is_free_again_after_a_grammar,  # noqa: F401
    test_parameters_that_leave_no_allowed_token_end_in_an_error,  # noqa: F401
    test_preempted_requests_go_on_in_their_grammar,  # noqa: F401
    test_schemas_and_expressions_are_kept_beside_free_requests,  # noqa: F401
    test_what_ends_a_request_under_a_grammar_ends_it_in_time,  # noqa: F401
)
