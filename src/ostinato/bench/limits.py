"""The limit set by memory: bytes that a decode step must read, and how fast this machine reads."""

from __future__ import annotations

import torch

from ostinato.models.config import ModelConfig

from ..tools.timing import device_us

KNOWN_READ_RATES = {"NVIDIA H200": 4.5e12}
"""Best measured read rates, in bytes per second, by the GPU's name (a chain of GEMVs over 15 GB of
weights)."""

_COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}


def weight_bytes_per_step(shape: ModelConfig, dtype: torch.dtype) -> int:
    """Weights that one step reads, each once. Of an embedding table that is not the output layer too, only a
    few rows are read, which are not counted."""
    head = shape.head_dim
    attention = shape.hidden_size * head * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    feed_forward = 3 * shape.hidden_size * shape.intermediate_size
    output = shape.vocab_size * shape.hidden_size if shape.has_lm_head else 0
    return (shape.num_layers * (attention + feed_forward) + output) * dtype.itemsize


def kv_bytes_per_token(shape: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of KV of one position in all layers."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * dtype.itemsize


def step_bytes(shape: ModelConfig, dtype: torch.dtype, batch: int, mean_context: float) -> float:
    """Bytes that a decode step of `batch` requests reads: all weights, and every request's KV."""
    kv = batch * mean_context * kv_bytes_per_token(shape, dtype)
    return weight_bytes_per_step(shape, dtype) + kv


def read_rate(device: torch.device) -> tuple[float, str]:
    """Bytes per second, and the source of the figure."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if name in KNOWN_READ_RATES:
            return KNOWN_READ_RATES[name], "best read rate seen on this GPU"
    return copy_rate(device), "a large copy, bytes read plus bytes written"


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read plus written, of a large copy on `device`."""
    size = _COPIED_BYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    microseconds = device_us(lambda: target.copy_(source), device, repeats=3, rounds=3)
    return 2 * size / (microseconds / 1e6)
