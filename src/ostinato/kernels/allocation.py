"""Where memory that lives as long as a model comes from: torch, or somebody who places it.

Weights and KV cache ask for every tensor by name. Whoever keeps memory in arenas, to release it and take it
back at the same addresses, gives an `Allocate`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Allocate = Callable[[tuple[int, ...], torch.dtype, str], Tensor]
"""`allocate(shape, dtype, name) -> dense tensor` on the device of whoever asks, its contents undefined."""

ALIGNMENT = 16
"""Bytes that kernels load at a time: where a tensor may begin."""


class AllocationError(ValueError):
    """An allocator gave something else than it was asked for."""


def allocated(
    allocate: Allocate, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, name: str
) -> Tensor:
    """Allocates a tensor, and raises if kernels cannot use what the allocator gave."""
    tensor = allocate(shape, dtype, name)
    is_there = tensor.device.type == device.type and device.index in (None, tensor.device.index)
    if tensor.shape != shape or tensor.dtype != dtype or not is_there:
        raise AllocationError(
            f"{name}: asked for {list(shape)} of {dtype} on {device}, the allocator gave "
            f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
        )
    if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT:
        raise AllocationError(f"{name}: the allocator gave memory with gaps or not at {ALIGNMENT} bytes")
    return tensor
