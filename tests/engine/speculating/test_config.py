"""vLLM's keys of speculation: what is taken, and what is refused by name."""

from pathlib import Path
from typing import Any

import pytest

from ostinato.engine.peer_options.translation import translated
from ostinato.engine.speculating.config import SpeculativeConfig
from ostinato.graphs.errors import ConfigError

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
EAGLE = {"method": "eagle3", "num_speculative_tokens": 3, "model": "somewhere"}


def test_defaults_are_those_of_vllm() -> None:
    config = SpeculativeConfig.parse(NGRAM)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (5, 5)
    only_max = SpeculativeConfig.parse({**NGRAM, "prompt_lookup_max": 3})
    assert (only_max.prompt_lookup_min, only_max.prompt_lookup_max) == (3, 3)
    assert config.synthetic_rates is None
    assert config.scheduled(7) is None
    values = {"draft_tensor_parallel_size": 1, "quantization": None, "draft_sample_method": "greedy"}
    assert SpeculativeConfig.parse({**NGRAM, **values}) == config


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"),
        ("yuhuili/EAGLE-LLaMA3-Instruct-8B", "eagle"),
        ("meta-llama/Llama-3.2-1B", "draft_model"),
    ],
)
def test_a_method_is_found_by_the_name_of_the_model(model: str, method: str) -> None:
    config = SpeculativeConfig.parse({"model": model, "num_speculative_tokens": 2})
    assert (config.method, config.model) == (method, model)
    assert SpeculativeConfig.parse({"model": "ngram", "num_speculative_tokens": 2}).model is None
    assert SpeculativeConfig.parse({**EAGLE, "model": Path("a/b")}).model == "a/b"


def test_a_schedule_reaches_over_gaps_and_to_the_end() -> None:
    rows = [[32, 128, 1], [1, 16, 3]]
    config = SpeculativeConfig.parse({**NGRAM, "num_speculative_tokens_per_batch_size": rows})
    assert [config.scheduled(requests) for requests in (1, 16, 17, 31, 32, 500)] == [3, 3, 3, 3, 1, 1]


def test_a_length_becomes_rates_of_the_least_variance() -> None:
    synthetic = {**NGRAM, "rejection_sample_method": "synthetic"}
    config = SpeculativeConfig.parse({**synthetic, "synthetic_acceptance_length": 3.25})
    assert config.synthetic_rates == (1.0, 1.0, 0.25, 0.0)
    rates = {"synthetic_acceptance_rates": [0.9, 0.5, 0.5, 0]}
    assert SpeculativeConfig.parse({**synthetic, **rates}).synthetic_rates == (0.9, 0.5, 0.5, 0.0)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "method is missing"),
        ({"method": "medusa", "num_speculative_tokens": 2}, "'medusa'"),
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({**NGRAM, "num_speculative_tokens": 16}, "from 1 to 15"),
        ({**NGRAM, "num_speculative_tokens": True}, "num_speculative_tokens"),
        ({**NGRAM, "model": "x"}, "'x'"),
        ({**NGRAM, "revision": "main"}, "leave revision out"),
        ({**EAGLE, "model": None}, "model is missing"),
        ({**EAGLE, "model": ""}, "model is missing"),
        ({**EAGLE, "model": 5}, "model must be a string, not 5"),
        ({**NGRAM, "prompt_lookup_max": 65}, "prompt_lookup_max must be an integer, from 1 to 64"),
        ({**EAGLE, "prompt_lookup_max": 3}, "prompt_lookup"),
        ({**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min"),
        ({**EAGLE, "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size"),
        ({**EAGLE, "draft_tensor_parallel_size": True}, "draft_tensor_parallel_size"),
        ({**EAGLE, "enforce_eager": 0}, "enforce_eager can only be False, not 0"),
        ({**EAGLE, "parallel_drafting": True}, "parallel_drafting"),
        ({**EAGLE, "draft_sample_method": "probabilistic"}, "draft_sample_method"),
        ({**EAGLE, "max_model_len": 100}, "max_model_len"),
        ({**EAGLE, "draft_load_config": {"load_format": "gguf"}}, "load_format"),
        ({**NGRAM, "rejection_sample_method": "block"}, "'block'"),
        ({**NGRAM, "rejection_sample_method": "synthetic"}, "either"),
        ({**NGRAM, "synthetic_acceptance_length": 2}, "need"),
        ({**NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 6}, "1 to 5"),
        (
            {
                **NGRAM,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": [0.1, 0.2, 0.1, 0],
            },
            "rise",
        ),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[2, 3, 1]]}, "begin at 1"),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 4, 1], [4, 5, 1]]}, "overlap"),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 4, 5]]}, "0 to num_speculative_tokens"),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": []}, "must be a list"),
        (
            {**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 4, 1]], "disable_adaptive": True},
            "leave one of them out",
        ),
        ({**NGRAM, "speed": 3}, "'speed'"),
    ],
)
def test_what_cannot_be_had_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SpeculativeConfig.parse(given)


def test_flags_of_sglang_make_one_configuration() -> None:
    given = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "head"}
    more = {"speculative_num_steps": 4, "speculative_num_draft_tokens": 5, "speculative_eagle_topk": 1}
    expected = {"method": "eagle3", "model": "head", "num_speculative_tokens": 4}
    assert translated({**given, **more}) == {"speculative_config": expected}
    assert translated(given) == {"speculative_config": {**expected, "num_speculative_tokens": 3}}
    short = {"spec_method": "eagle3", "spec_model": "head", "spec_tokens": 4}
    assert translated(short) == {"speculative_config": expected}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"speculative_algorithm": "NEXTN"}, "'NEXTN' is not supported: use EAGLE, EAGLE3"),
        (
            {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4},
            "speculative_eagle_topk can only be 1",
        ),
        ({"speculative_num_steps": 3, "speculative_num_draft_tokens": 8}, "num_steps or .*num_draft_tokens"),
        ({"speculative_config": NGRAM, "spec_tokens": 3}, "speculative_config or spec_tokens"),
        ({"speculative_accept_threshold_single": 0.5}, "can only be 1.0"),
    ],
)
def test_flags_that_contradict_or_ask_for_more_are_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        translated(given)
