"""How decode attention divides its work: by the number of tokens and heads, as measured on an H200."""

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch

from ..gpu import Gpu
from ..host_sizes import cdiv, next_power_of_2
from .shared_memory import key_blocks

# Programs that a split batch should have, and how many need no splitting.
_PROGRAMS_WANTED = 256
_ENOUGH_PROGRAMS = 96
MAX_SPLITS = 32
"""Parts of the context per token and KV head, at most."""


@dataclass(frozen=True)
class DecodeTile:
    """How a program works; one choice per dtype and kind of batch, so few variants are compiled."""

    key_block: int
    """Keys at a time."""
    least_blocks: int
    """Blocks of keys that a split has at least: short contexts are not split, for joining costs more."""
    num_warps: int
    num_stages: int
    ahead: bool
    """Hold the next tiles in registers, the first ones loaded before the wait; else copy ahead into shared
    memory, which leaves registers for more programs."""


def decode_tile(dtype: torch.dtype, num_tokens: int, head_dim: int) -> DecodeTile:
    """The tile for a batch: of wide heads half as many keys, for which there are registers."""
    tile = _measured_tile(dtype, num_tokens)
    if head_dim <= 128:
        return tile
    return replace(tile, key_block=max(16, tile.key_block // 2), least_blocks=2 * tile.least_blocks)


def _measured_tile(dtype: torch.dtype, num_tokens: int) -> DecodeTile:
    """On an H200 (docs/kernels.md), with heads of up to 128."""
    if dtype == torch.float32:
        return DecodeTile(key_block=32, least_blocks=1, num_warps=4, num_stages=2, ahead=False)
    if num_tokens == 1:
        return DecodeTile(key_block=32, least_blocks=1, num_warps=8, num_stages=1, ahead=True)
    if num_tokens <= 8:
        return DecodeTile(key_block=64, least_blocks=4, num_warps=8, num_stages=1, ahead=True)
    if num_tokens <= 48:
        return DecodeTile(key_block=64, least_blocks=4, num_warps=4, num_stages=1, ahead=True)
    # A program of one warp has nobody to wait for, and many of them hide each other's latency.
    return DecodeTile(key_block=32, least_blocks=8, num_warps=1, num_stages=3, ahead=False)


CUDA_MAX_TOKENS = (256, 1024)
"""Requests that the CUDA kernel has room for in its list of work: it is compiled for either."""


@dataclass(frozen=True)
class CudaDecodeTile:
    """How the CUDA kernel works: constants it is compiled with, and how contexts are cut."""

    warps: int
    """Of a program; they share the tiles of 16 keys of a unit of work."""
    slots: int
    """Half tiles (keys or values) that a warp has on their way."""
    programs: int
    """On a multiprocessor at a time."""
    chunk_tiles: int
    """A context is cut into chunks of about that many tiles, each a unit of work..."""
    max_chunks: int
    """...unless that makes more than so many."""


def cuda_decode_tile(
    num_requests: int, num_kv_heads: int, group: int, gpu: Gpu, num_queries: int = 1
) -> CudaDecodeTile:
    """The CUDA kernel's tile for a batch; measured on an H200 (docs/kernels.md)."""
    pairs, multiprocessors = num_requests * num_kv_heads, gpu.multiprocessors
    if num_queries > 1:
        # Joining takes longer than attending to twice the keys: programs are few, warps many.
        if pairs <= multiprocessors:
            return CudaDecodeTile(8, 4, 1, chunk_tiles=16, max_chunks=max(1, multiprocessors // pairs))
        if group * num_queries > 24:
            return CudaDecodeTile(8, 4, 1, chunk_tiles=32, max_chunks=8)
        return CudaDecodeTile(4, 5, 2, chunk_tiles=64, max_chunks=8)
    if group > 8:  # twice the registers
        return CudaDecodeTile(8, 3, 1, chunk_tiles=32, max_chunks=max(8, multiprocessors // pairs))
    if pairs <= 32:
        # 256 keys are on their way before the wait; short contexts are joined in one program.
        return CudaDecodeTile(8, 4, 1, chunk_tiles=16, max_chunks=max(1, multiprocessors // pairs))
    if pairs <= multiprocessors:
        return CudaDecodeTile(4, 6, 2, chunk_tiles=32, max_chunks=2 * multiprocessors // pairs)
    if pairs <= 2 * multiprocessors and group > 2:
        return CudaDecodeTile(4, 4, 2, chunk_tiles=64, max_chunks=8)
    chunk_tiles = 32 if pairs < 1024 else 64
    # Four programs leave a thread 128 registers: not enough for 8 queries, says NVRTC 13.4.
    return CudaDecodeTile(4, 3, 4 if group < 8 else 3, chunk_tiles, max_chunks=8)


def num_splits_of(num_tokens: int, num_kv_heads: int) -> int:
    """Parts of the context per token and KV head, enough to fill a GPU."""
    programs = num_tokens * num_kv_heads
    if programs >= _ENOUGH_PROGRAMS:
        return 1
    return min(MAX_SPLITS, _PROGRAMS_WANTED // programs)


@dataclass(frozen=True)
class PrefixTile:
    """How a program attends to a part of a shared prefix, for queries of many requests at once."""

    query_block: int
    """Query heads at a time, of any requests."""
    key_block: int
    """Keys at a time."""
    least_blocks: int
    """Blocks of keys that a split has at least."""
    num_warps: int
    num_stages: int


def prefix_tile(dtype: torch.dtype, num_tokens: int, group: int, head_dim: int, gpu: Gpu) -> PrefixTile:
    """The tile for a batch: that of prompt attention, or less where there are fewer queries."""
    query_block = _prefix_queries(dtype, num_tokens, group)
    blocks = key_blocks(dtype, head_dim, query_block, (5, 4), gpu, programs=2)
    return PrefixTile(query_block, blocks.keys, least_blocks=2, num_warps=4, num_stages=blocks.num_stages)


def _prefix_queries(dtype: torch.dtype, num_tokens: int, group: int) -> int:
    return max(16, min(32 if dtype == torch.float32 else 64, next_power_of_2(num_tokens * group)))


def prefix_splits_of(
    tile: PrefixTile, num_tokens: int, num_heads: int, num_kv_heads: int, limit: int, gpu: Gpu
) -> int:
    """Parts of a prefix of at most `limit` positions, enough to fill a GPU.

    Two programs on a multiprocessor hide each other's gaps. One is enough for a single block of 64 queries:
    it waits for memory, has enough on its way, and joining twice the parts would take longer.
    """
    tiles = cdiv(num_tokens * (num_heads // num_kv_heads), tile.query_block)
    is_one_large = tiles == 1 and tile.query_block >= 64
    wanted = gpu.multiprocessors * (1 if is_one_large else 2) // (tiles * num_kv_heads)
    return max(1, min(wanted, MAX_SPLITS, cdiv(limit, tile.key_block * tile.least_blocks)))


def cascade_class(num_tokens: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> Hashable:
    """Equal for batches whose attention over a shared prefix runs the same compiled kernels."""
    return _measured_tile(dtype, num_tokens), _prefix_queries(dtype, num_tokens, num_heads // num_kv_heads)


def decode_class(
    num_requests: int, num_kv_heads: int, dtype: torch.dtype, gpu: Gpu, num_queries: int = 1
) -> Hashable:
    """Equal for batches that run the same compiled kernels, whichever of the two kernels that is.

    Of several tokens a request only what the CUDA kernel decides: where that does not serve, attention is
    that of any batch (`query_tiles.query_class`).
    """
    triton = None
    if num_queries == 1:
        triton = _measured_tile(dtype, num_requests), num_splits_of(num_requests, num_kv_heads) > 1
    if dtype == torch.float32:
        return triton, num_queries
    # Between them, groups of 1 and of 3 have all the differences there are; above 8 there is one tile only.
    tiles = (cuda_decode_tile(num_requests, num_kv_heads, group, gpu, num_queries) for group in (1, 3))
    room = next((limit for limit in CUDA_MAX_TOKENS if num_requests <= limit), None)
    return triton, num_queries, room, tuple((tile.warps, tile.slots, tile.programs) for tile in tiles)
