"""Tensors and the memory behind them."""

from collections.abc import Callable
from typing import Any

import torch

Allocate = Callable[[int], torch.Tensor]
"""So many bytes of long-lived memory, as uint8."""


_CONTAINERS = (list, tuple, dict)


def unowned_storage(address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage over existing memory; it neither frees nor keeps it."""
    construct: Callable[..., torch.UntypedStorage] = torch._C._construct_storage_from_data_pointer  # type: ignore
    return construct(address, device, nbytes)


def tensor_over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    size: torch.Size | tuple[int, ...],
    stride: tuple[int, ...],
    storage_offset: int = 0,
) -> torch.Tensor:
    """A tensor with the given geometry over a storage (offset in elements)."""
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    if not torch.is_grad_enabled():  # as it is while thousands of them are made
        return tensor.set_(storage, storage_offset, size, stride)
    with torch.no_grad():
        return tensor.set_(storage, storage_offset, size, stride)


def weak_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor at the same address that does not keep the memory from being reused."""
    first = storage_address(tensor)
    alias = unowned_storage(first, byte_range(tensor)[1] - first, tensor.device)
    plain = tensor_over(alias, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
    with torch.no_grad():
        conjugated = plain.conj() if tensor.is_conj() else plain
        return torch._neg_view(conjugated) if tensor.is_neg() else conjugated


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, for the host to use: pinned memory, once the device has ended what may write it."""
    if tensor.is_cpu and torch.cuda.is_initialized() and tensor.is_pinned():
        torch.cuda.synchronize()
    return tensor


def storage_address(tensor: torch.Tensor) -> int:
    """Where the tensor's storage begins; 0 for an empty one. Makes no Python object of the storage."""
    address = tensor.data_ptr()
    return address - int(tensor.storage_offset()) * tensor.itemsize if address else 0


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses a tensor may touch: the first, and the one behind the last."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    reach = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return start, start + (reach + 1) * tensor.itemsize


def is_foreign(tensor: torch.Tensor) -> bool:
    """A tensor subclass with a dispatch of its own, which has to unwrap itself first."""
    return type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has memory of the ordinary kind."""
    return not is_foreign(tensor) and tensor.layout is torch.strided and not tensor.is_nested


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors among the arguments or results of an ATen call (nested lists and tuples only)."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    if isinstance(value, _CONTAINERS):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, torch.Tensor):
                found.append(item)
            elif isinstance(item, _CONTAINERS):
                found += tensors_of(item)
    return found
