"""An option that does not exist or makes no sense is refused, with advice."""

from typing import Any

import pytest

from ostinato.engine.llm import LLM
from ostinato.engine.loading.load import ModelLoadError
from ostinato.graphs import ConfigError

from .conftest import TinyModel
from .test_engine_greedy import SMALL


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_modle_len": 5}, "unknown option 'max_modle_len': did you mean max_model_len"),
        ({"xyzzy": 5}, "unknown option 'xyzzy': use one of model, dtype"),
        ({"max_model_len": 4096}, "max_model_len 4096 is beyond the model's own limit of 128"),
        ({"max_model_len": 0}, "max_model_len must be at least 1, not 0"),
        ({"max_running_requests": -1}, "max_running_requests must be at least 1"),
        ({"cuda_graph_mode": "fast"}, "unknown graph mode"),
        ({"dtype": "int8"}, "unknown dtype 'int8': use auto, float32"),
        ({"load_format": "pickle"}, "unknown load_format 'pickle': use auto or dummy"),
        ({"num_pages": 1}, "at least 2 pages"),
        ({"mem_fraction": 1.5}, r"mem_fraction must be in \(0, 1\], not 1.5"),
        ({"device": "abacus"}, "unknown device 'abacus': use auto, cpu, cuda"),
        ({"device": "mps"}, "unknown device 'mps': use auto, cpu, cuda"),
        ({"steps_ahead": 2}, "steps_ahead must be 0 or 1"),
        ({"cuda_graph_bs": [1, 99]}, "cuda_graph_bs reaches 99, but at most 16 requests run"),
        ({"cuda_graph_bs": [1], "cuda_graph_max_bs": 2}, "not both: a list has its own maximum"),
        ({"cuda_graph_bs": []}, "at least one size"),
        ({"cuda_graph_prefill_tokens": [0, 8]}, "positive integer, not 0"),
        ({"cuda_graph_memory_mb": -3}, "cuda_graph_memory_mb must be at least 1"),
        ({"attention_backend": "flash"}, "unknown attention backend 'flash': use one of auto, torch"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_bad_options_are_refused_with_advice(tiny: TinyModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ModelLoadError), match=message):
        LLM(tiny.directory, **options)


@pytest.mark.parametrize("option", ["cuda_graph_max_bs", "cuda_graph_memory_mb"])
def test_zero_is_refused_like_any_other_impossible_number(tiny: TinyModel, option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        LLM(tiny.directory, **{**SMALL, option: 0}).close()


@pytest.mark.parametrize(
    "options",
    [{"max_model_len": "64"}, {"max_model_len": 64.5}, {"seed": -1}, {"mem_fraction": "0.5"}],
    ids=str,
)
def test_options_of_a_wrong_type_are_refused(tiny: TinyModel, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        LLM(tiny.directory, **{**SMALL, **options}).close()
