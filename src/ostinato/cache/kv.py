"""The memory of the KV cache: two tensors per layer, in pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ostinato.kernels.allocation import Allocate, allocated

from .pages import PAGE_SIZE


class KVCacheError(ValueError):
    """The KV cache cannot be built as requested."""


@dataclass(frozen=True)
class KVShape:
    """What a model stores per token."""

    num_layers: int
    """Layers that have keys and values."""
    num_kv_heads: int
    """Key and value heads of a layer."""
    head_dim: int
    """Size of a head."""
    dtype: torch.dtype
    """Type of the stored keys and values."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise KVCacheError(f"{name} of a KV cache must be at least 1, not {getattr(self, name)}")

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page in all layers, keys and values together."""
        elements = 2 * self.num_layers * PAGE_SIZE * self.num_kv_heads * self.head_dim
        return elements * self.dtype.itemsize

    def pages_that_fit(self, free_bytes: int) -> int:
        """How many pages, page 0 included, fit into `free_bytes`. Raises KVCacheError for fewer than two."""
        pages = free_bytes // self.bytes_per_page
        if pages < 2:
            raise KVCacheError(
                f"{max(free_bytes, 0) / 2**20:.1f} MiB are free for the KV cache, but two pages (one of them "
                f"reserved) take {2 * self.bytes_per_page / 2**20:.1f} MiB: raise mem_fraction, or use a "
                "smaller model or fewer captured sizes"
            )
        return pages


class KVCache:
    """Keys and values of all layers, each [num_pages, 16, num_kv_heads, head_dim], at fixed addresses.

    Starts as zeros, never uninitialised: padding reads page 0, and unused slots are multiplied by
    attention weights of zero, which does not remove a NaN.
    """

    def __init__(
        self,
        shape: KVShape,
        num_pages: int,
        device: torch.device | str,
        allocate: Allocate | None = None,
        name: str = "kv",
    ) -> None:
        """Allocate `num_pages` pages on `device`, from `allocate` or, by default, from torch.

        `name`: prefix of the names of its tensors.
        """
        if num_pages < 2:
            raise KVCacheError(f"a KV cache needs at least 2 pages (page 0 is reserved), not {num_pages}")
        self.shape = shape
        self.num_pages = num_pages
        self._name = name
        size = (num_pages, PAGE_SIZE, shape.num_kv_heads, shape.head_dim)

        def zeros(of: str) -> torch.Tensor:
            if allocate is None:  # on a CPU, memory is committed only when used
                return torch.zeros(size, dtype=shape.dtype, device=device)
            return allocated(allocate, size, shape.dtype, torch.device(device), of).zero_()

        self.k = [zeros(f"{name}.{layer}.k") for layer in range(shape.num_layers)]
        """Keys per layer."""
        self.v = [zeros(f"{name}.{layer}.v") for layer in range(shape.num_layers)]
        """Values per layer."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self.shape.bytes_per_page

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer."""
        return self.k[index], self.v[index]

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name, for the runner's address watch."""
        keys = {f"{self._name}.{layer}.k": tensor for layer, tensor in enumerate(self.k)}
        return keys | {f"{self._name}.{layer}.v": tensor for layer, tensor in enumerate(self.v)}
