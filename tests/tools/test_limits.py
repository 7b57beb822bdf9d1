"""Bytes of a step, against those of the public models."""

from pathlib import Path

import pytest
import torch

from ostinato.bench.limits import copy_rate, step_bytes, weight_bytes_per_step
from ostinato.models.config import ModelConfig

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"


@pytest.mark.parametrize(
    ("model", "batch", "context", "limit_ms"),
    [
        ("qwen3-0.6b", 1, 192, 0.27),
        ("qwen3-0.6b", 256, 192, 1.52),
        ("llama-3.2-1b", 32, 192, 0.59),
        ("llama-3.1-8b", 1, 160, 3.34),
        ("llama-3.1-8b", 128, 160, 3.93),
    ],
)
def test_limits_are_those_of_the_committed_table(
    model: str, batch: int, context: int, limit_ms: float
) -> None:
    shape = ModelConfig.load(MODELS / model)
    needed = step_bytes(shape, torch.bfloat16, batch, context)
    assert needed / 4.5e12 * 1e3 == pytest.approx(limit_ms, abs=0.006)


def test_an_embedding_that_is_not_the_output_layer_is_not_read() -> None:
    shape = ModelConfig.load(MODELS / "llama-3.1-8b")
    all_parameters = 8.03e9
    table = shape.vocab_size * shape.hidden_size
    assert weight_bytes_per_step(shape, torch.bfloat16) == pytest.approx(
        2 * (all_parameters - table), rel=1e-3
    )


def test_copying_takes_time() -> None:
    assert 1e8 < copy_rate(torch.device("cpu")) < 1e13
