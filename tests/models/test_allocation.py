"""Weights are where the allocator says, by name, each once, and nothing else changes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.kernels.allocation import AllocationError
from ostinato.models.weights import checkpoint_tensors, load_model

from .arena import Arena
from .small_models import all_logits, saved_model

IDS = torch.arange(20)


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
@pytest.mark.parametrize("family", ["llama-biases", "llama-tied", "qwen3"])
def test_all_weights_lie_in_one_arena(family: str, load_format: Any, tmp_path: Path) -> None:
    saved_model(family, tmp_path)
    plain = load_model(tmp_path, load_format=load_format)
    arena = Arena(1 << 20)
    model = load_model(tmp_path, load_format=load_format, allocate=arena.allocate)
    parameters = dict(model.named_parameters())
    assert sorted(arena.asked) == sorted(parameters)
    assert all(arena.holds(parameter) for parameter in parameters.values())
    assert all(arena.holds(view) for view in checkpoint_tensors(model).values())
    assert not arena.holds(model.rotary.table), "which loading could not fill again"
    assert not any(arena.holds(parameter) for parameter in plain.parameters())
    assert torch.equal(all_logits(model, IDS), all_logits(plain, IDS))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda shape, dtype: torch.empty(7, dtype=dtype), r"gave \[7\]"),
        (lambda shape, dtype: torch.empty(shape, dtype=torch.float64), r"gave .* of torch\.float64"),
        (lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta"), "on meta"),
        (lambda shape, dtype: torch.empty(shape, dtype=dtype).flatten()[:1].expand(shape), "with gaps"),
        (
            lambda shape, dtype: torch.empty(torch.Size(shape).numel() + 1, dtype=dtype)[1:].view(shape),
            "not at 16 bytes",
        ),
    ],
)
def test_memory_that_kernels_could_not_use_is_refused_with_its_name(
    wrong: Any, message: str, tmp_path: Path
) -> None:
    saved_model("llama", tmp_path)

    def allocate(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
        return (
            wrong(shape, dtype)
            if name == "layers.1.mlp.down_proj.weight"
            else torch.empty(shape, dtype=dtype)
        )

    with pytest.raises(AllocationError, match=rf"^layers\.1\.mlp\.down_proj\.weight: .*{message}"):
        load_model(tmp_path, dtype=torch.float32, allocate=allocate)
