"""The memory of the KV cache."""

from __future__ import annotations

import pytest
import torch

from models.arena import Arena
from ostinato.cache.kv import KVCache, KVCacheError, KVShape
from ostinato.kernels.allocation import AllocationError

SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)


def test_keys_and_values_per_layer_start_as_zeros() -> None:
    cache = KVCache(SHAPE, num_pages=5, device="cpu")
    assert len(cache.named_tensors()) == 6
    for tensor in cache.named_tensors().values():
        assert tensor.shape == (5, 16, 2, 8)
        assert tensor.dtype is torch.bfloat16
        assert not tensor.any()
    assert cache.layer(2) == (cache.k[2], cache.v[2])


def test_bytes_are_what_the_tensors_take() -> None:
    cache = KVCache(SHAPE, num_pages=5, device="cpu")
    assert cache.num_bytes == sum(t.numel() * t.element_size() for t in cache.named_tensors().values())
    assert cache.num_bytes == 5 * SHAPE.bytes_per_page


def test_pages_that_fit_is_exact() -> None:
    assert SHAPE.pages_that_fit(7 * SHAPE.bytes_per_page) == 7
    assert SHAPE.pages_that_fit(8 * SHAPE.bytes_per_page - 1) == 7


@pytest.mark.parametrize("free", [-(2**20), 0, 2 * SHAPE.bytes_per_page - 1])
def test_too_little_memory_is_a_clear_error(free: int) -> None:
    with pytest.raises(KVCacheError, match="raise mem_fraction"):
        SHAPE.pages_that_fit(free)


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(KVCacheError, match="at least 2 pages"):
        KVCache(SHAPE, num_pages=1, device="cpu")
    with pytest.raises(KVCacheError, match="num_kv_heads"):
        KVShape(num_layers=1, num_kv_heads=0, head_dim=8, dtype=torch.float32)


def test_pages_lie_where_the_allocator_says_and_are_zeros_there_too() -> None:
    arena = Arena(3 * 2 * 5 * 16 * 2 * 8 * 2)
    cache = KVCache(SHAPE, num_pages=5, device="cpu", allocate=arena.allocate)
    assert sorted(arena.asked) == sorted(cache.named_tensors())
    assert all(arena.holds(tensor) and not tensor.any() for tensor in cache.named_tensors().values())
    assert arena.taken == arena.memory.numel() == cache.num_bytes


def test_an_allocator_that_gives_something_else_is_refused() -> None:
    with pytest.raises(AllocationError, match=r"^kv\.0\.k: asked for \[5, 16, 2, 8\]"):
        KVCache(SHAPE, num_pages=5, device="cpu", allocate=lambda shape, dtype, name: torch.zeros(1))
