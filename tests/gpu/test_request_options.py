"""Whole log probabilities, cut prompts, salts and streams on CUDA."""

from engine.conftest import tiny_text  # noqa: F401
from engine.test_request_options import (
    llm,  # noqa: F401
    test_log_probabilities_of_many_and_of_chosen_tokens,  # noqa: F401
    test_log_probabilities_of_the_whole_vocabulary,  # noqa: F401
    test_prompts_are_cut_to_their_end,  # noqa: F401
    test_salts_divide_the_prefix_cache,  # noqa: F401
    test_streams_of_an_engine,  # noqa: F401
)
