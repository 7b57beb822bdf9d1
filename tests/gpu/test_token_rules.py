"""Allowed tokens, bad words and logits processors on CUDA, in step and one step ahead."""

import pytest

pytest.importorskip("xgrammar")

from engine.conftest import tiny_text  # noqa: F401
from engine.test_token_rules import (
    llm,  # noqa: F401
    test_a_row_is_free_again_behind_lists,  # noqa: F401
    test_functions_beside_everything_else,  # noqa: F401
    test_functions_see_the_tokens_and_change_the_logits,  # noqa: F401
    test_functions_that_fail_end_their_own_request,  # noqa: F401
    test_lists_and_grammars_together,  # noqa: F401
    test_lists_that_come_to_exclude_each_other_end_in_an_error,  # noqa: F401
    test_preempted_requests_keep_to_their_lists,  # noqa: F401
    test_tokens_are_those_of_a_plain_computation,  # noqa: F401
    test_words_are_forbidden_as_they_are_written,  # noqa: F401
)
