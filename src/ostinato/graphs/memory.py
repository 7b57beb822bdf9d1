"""Tensors over memory that somebody else owns."""

from collections.abc import Callable

import torch


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
    with torch.no_grad():
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, storage_offset, size, stride)


def weak_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor at the same address that does not keep the memory from being reused."""
    storage = tensor.untyped_storage()
    alias = unowned_storage(storage.data_ptr(), storage.nbytes(), tensor.device)
    return tensor_over(alias, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
