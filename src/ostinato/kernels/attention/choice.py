"""How attention divides its work, by shape and GPU: key blocks, decode tiles, prefix tiles, prompt tiles.

The rules were measured on an H200 (docs/kernels.md).
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ..gpu import H200, Gpu
from ..host_sizes import cdiv, next_power_of_2
from ..registry import PLAIN, Rule, register, rule_for


class BackendError(ValueError):
    """A backend that does not exist, or that cannot run on this device."""


@dataclass(frozen=True)
class KeyBlocks:
    """How keys and values come to products with many queries."""

    keys: int
    """At a time."""
    num_stages: int
    """Triton counts the way from a page's number to its keys as a stage of its own, so that five of them have
    two blocks on their way."""

    def shared_bytes(self, dtype: torch.dtype, head_dim: int, queries: int) -> int:
        """Returns the most that a CTA takes: its queries, the blocks, and some for scores and sums."""
        blocks = max(1, self.num_stages - 2)
        head = max(16, next_power_of_2(head_dim)) * dtype.itemsize
        scores = queries * self.keys * dtype.itemsize if dtype == torch.float32 else 0
        return head * (queries + 2 * blocks * self.keys) + scores + (1 << 10)


def key_blocks(
    dtype: torch.dtype, head_dim: int, queries: int, stages: tuple[int, ...], gpu: Gpu, programs: int
) -> KeyBlocks:
    """Returns the largest blocks, most of them in flight, with which so many CTAs fit on an SM.

    Or the smallest, if one CTA has.
    """
    # float32 products need more registers.
    sizes, stages = ((32, 16), (2,)) if dtype == torch.float32 else ((64, 32, 16), stages)
    all_blocks = [KeyBlocks(keys, num_stages) for keys in sizes for num_stages in stages]
    for blocks in all_blocks:
        if blocks.shared_bytes(dtype, head_dim, queries) <= gpu.room_for(programs):
            return blocks
    needed = all_blocks[-1].shared_bytes(dtype, head_dim, queries)
    if needed > gpu.room_for(1):
        raise BackendError(
            f"triton attention of heads of {head_dim} in {dtype} takes {needed} bytes of shared memory and "
            f"this GPU has {gpu.room_for(1)} for a program: use the torch backend"
        )
    return all_blocks[-1]


# CTAs that a split batch should have, and how many need no splitting.
_PROGRAMS_WANTED = 256
_ENOUGH_PROGRAMS = 96
MAX_SPLITS = 32
"""Parts of the context per token and KV head, at most."""


@dataclass(frozen=True)
class DecodeTile:
    """How a CTA works; one choice per dtype and kind of batch, so few variants are compiled."""

    key_block: int
    """Keys at a time."""
    least_blocks: int
    """Blocks of keys that a split has at least: short contexts are not split, for joining costs more."""
    num_warps: int
    num_stages: int
    ahead: bool
    """Hold the next tiles in registers, the first ones loaded before the wait; else copy ahead into shared
    memory, which leaves registers for more CTAs."""


def decode_tile(dtype: torch.dtype, num_tokens: int, head_dim: int) -> DecodeTile:
    """Returns the tile for a batch: half as many keys for wide heads, which need the registers."""
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
    # A CTA of one warp has nobody to wait for, and many of them hide each other's latency.
    return DecodeTile(key_block=32, least_blocks=8, num_warps=1, num_stages=3, ahead=False)


CUDA_MAX_TOKENS = (256, 1024)
"""Requests that the CUDA kernel has room for in its list of work: it is compiled for either."""


@dataclass(frozen=True)
class CudaDecodeTile:
    """How the CUDA kernel works: constants it is compiled with, and how contexts are cut."""

    warps: int
    """Of a CTA; they share the tiles of 16 keys of a unit of work."""
    slots: int
    """Half tiles (keys or values) that a warp has on their way."""
    programs: int
    """On a SM at a time."""
    chunk_tiles: int
    """A context is cut into chunks of about that many tiles, each a unit of work..."""
    max_chunks: int
    """...unless that makes more than so many."""


def cuda_decode_tile(
    num_requests: int, num_kv_heads: int, group: int, gpu: Gpu, num_queries: int = 1
) -> CudaDecodeTile:
    """Returns the CUDA kernel's tile for a batch."""
    rule = rule_for("attention.decode", PLAIN, gpu)
    tile: CudaDecodeTile = rule.choose(num_requests, num_kv_heads, group, num_queries, gpu)
    return tile


def _decode_rule(
    num_requests: int, num_kv_heads: int, group: int, num_queries: int, gpu: Gpu
) -> CudaDecodeTile:
    pairs, multiprocessors = num_requests * num_kv_heads, gpu.multiprocessors
    if num_queries > 1:
        # Joining takes longer than attending to twice the keys: CTAs are few, warps many.
        if pairs <= multiprocessors:
            return CudaDecodeTile(8, 4, 1, chunk_tiles=16, max_chunks=max(1, multiprocessors // pairs))
        if group * num_queries > 24:
            return CudaDecodeTile(8, 4, 1, chunk_tiles=32, max_chunks=8)
        return CudaDecodeTile(4, 5, 2, chunk_tiles=64, max_chunks=8)
    if group > 8:  # twice the registers
        return CudaDecodeTile(8, 3, 1, chunk_tiles=32, max_chunks=max(8, multiprocessors // pairs))
    if pairs <= 32:
        # 256 keys are on their way before the wait; short contexts are joined in one CTA.
        return CudaDecodeTile(8, 4, 1, chunk_tiles=16, max_chunks=max(1, multiprocessors // pairs))
    if pairs <= multiprocessors:
        return CudaDecodeTile(4, 6, 2, chunk_tiles=32, max_chunks=2 * multiprocessors // pairs)
    if pairs <= 2 * multiprocessors and group > 2:
        return CudaDecodeTile(4, 4, 2, chunk_tiles=64, max_chunks=8)
    chunk_tiles = 32 if pairs < 1024 else 64
    # Four CTAs leave a thread 128 registers: not enough for 8 queries, says NVRTC 13.4.
    return CudaDecodeTile(4, 3, 4 if group < 8 else 3, chunk_tiles, max_chunks=8)


register(Rule("attention.decode", PLAIN, None, _decode_rule, (H200,)))


def num_splits_of(num_tokens: int, num_kv_heads: int) -> int:
    """Parts of the context per token and KV head, enough to fill a GPU."""
    programs = num_tokens * num_kv_heads
    if programs >= _ENOUGH_PROGRAMS:
        return 1
    return min(MAX_SPLITS, _PROGRAMS_WANTED // programs)


@dataclass(frozen=True)
class PrefixTile:
    """How a CTA attends to a part of a shared prefix, for queries of many requests at once."""

    query_block: int
    """Query heads at a time, of any requests."""
    key_block: int
    """Keys at a time."""
    least_blocks: int
    """Blocks of keys that a split has at least."""
    num_warps: int
    num_stages: int


def prefix_tile(dtype: torch.dtype, num_tokens: int, group: int, head_dim: int, gpu: Gpu) -> PrefixTile:
    """Returns the tile for a batch: that of prompt attention, or less where there are fewer queries."""
    query_block = _prefix_queries(dtype, num_tokens, group)
    blocks = key_blocks(dtype, head_dim, query_block, (5, 4), gpu, programs=2)
    return PrefixTile(query_block, blocks.keys, least_blocks=2, num_warps=4, num_stages=blocks.num_stages)


def _prefix_queries(dtype: torch.dtype, num_tokens: int, group: int) -> int:
    return max(16, min(32 if dtype == torch.float32 else 64, next_power_of_2(num_tokens * group)))


def prefix_splits_of(
    tile: PrefixTile, num_tokens: int, num_heads: int, num_kv_heads: int, limit: int, gpu: Gpu
) -> int:
    """Parts of a prefix of at most `limit` positions, enough to fill a GPU.

    Two CTAs on a SM hide each other's gaps. One is enough for a single block of 64 queries:
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


_PROGRAMS = 2
"""On a SM at a time, where contexts are cut: they hide each other's gaps."""
_LEAST_KEYS = 256
_KEYS_PER_QUERY = 8
"""Of a chunk, at least, for each query head of a tile: the part that it leaves has 4 bytes an element, which
are written and read, where a key and its value have 4 together. So parts move a quarter of what keys do."""
_LEAST_PARTS, _MOST_PARTS = 2, 64
_MOST_PART_BYTES = 40 << 20
"""Of all parts together: L2 holds most of them."""
_FEW_REQUESTS, _REQUESTS = 32, 256
"""What CTAs look at where they know no more: one for each lane of a warp, as many as usually run."""


@dataclass(frozen=True)
class QueryTile:
    """How a CTA works; few of them, so that few variants are compiled."""

    query_block: int
    """Queries of a request at a time..."""
    group_block: int
    """...times the query heads that share a KV head, padded to a power of two."""
    key_block: int
    """Keys at a time."""
    num_stages: int
    num_warps: int = 4


@dataclass(frozen=True)
class Chunks:
    """How contexts are cut, and who takes the chunks."""

    keys: int
    """Of a chunk, at least: contexts are cut at multiples of this, longer ones of 3/2 of it, twice as much,
    and so on, so that they have no more `parts`."""
    parts: int
    """Chunks that a token sees at most."""
    steps: int
    """How often chunks grow at most."""
    programs: int


@dataclass(frozen=True)
class Queries:
    """What is known of all batches of a rung, and of the layer."""

    dtype: torch.dtype
    num_tokens: int
    num_requests: int
    max_query_len: int
    max_context: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int = 0
    """Positions that a token sees; 0: all."""

    @lru_cache(1 << 12)  # every layer asks  # noqa: B019
    def divided(self, gpu: Gpu) -> tuple[QueryTile, Chunks | None]:
        """Returns the tile of a CTA; contexts are cut if one CTA for each tile would leave SMs idle."""
        divided: tuple[QueryTile, Chunks | None] = rule_for("attention.prompt", PLAIN, gpu).choose(self, gpu)
        return divided

    def _divided(self, gpu: Gpu) -> tuple[QueryTile, Chunks | None]:
        # Of wide heads fewer: a CTA that takes tiles in turn has fewer registers for sums.
        heads = self._heads_of_a_tile(64 if self.head_dim <= 128 else 32)
        blocks = key_blocks(self.dtype, self.head_dim, heads, (5, 4), gpu, _PROGRAMS)
        tile = self._tile(heads, blocks)
        tiles = cdiv(self.num_tokens, tile.query_block) * self.num_kv_heads
        least = max(_LEAST_KEYS, _KEYS_PER_QUERY * heads)
        if _PROGRAMS * tiles > gpu.multiprocessors or self._seen <= least:
            heads = self._heads_of_a_tile(64)
            return self._tile(heads, key_blocks(self.dtype, self.head_dim, heads, (4,), gpu, 1)), None
        resident = min(_PROGRAMS, gpu.most_programs(blocks.shared_bytes(self.dtype, self.head_dim, heads)))
        programs = resident * gpu.multiprocessors
        # As many as there are CTAs for the tiles of one request: a second round is as long as the first.
        part_bytes = self.num_tokens * self.num_heads * self.head_dim * 4
        most = max(_LEAST_PARTS, min(programs // tiles, _MOST_PARTS, _MOST_PART_BYTES // part_bytes))
        keys, parts, steps = self._chunks(least, most)
        units = (tiles + self.num_requests * self.num_kv_heads) * parts
        return tile, Chunks(keys, parts, steps, min(units, programs))

    @property
    def _seen(self) -> int:
        """Positions that a token sees at most."""
        return min(self.max_context, self.window or self.max_context)

    def _chunks(self, keys: int, most_parts: int) -> tuple[int, int, int]:
        """Least keys, parts and steps of `Chunks`. A window may begin and end anywhere in a chunk, and be
        anywhere in the context: there all chunks are alike."""
        if self.window:
            while (parts := cdiv(self._seen - 1, keys) + 1) > most_parts:
                keys *= 2
            return keys, parts, 0
        # Tokens of a step have two sizes of chunks at most: the next length at which they grow is far away.
        while keys < self.max_context and most_parts * keys < 2 * self.max_query_len:
            keys *= 2
        # Steps enough for any rung of this limit: each number of them is a kernel of its own.
        steps = 0
        while _LEAST_PARTS * grown(_LEAST_KEYS, steps) < self.max_context:
            steps += 1
        return keys, min(most_parts, cdiv(self.max_context, keys)), steps

    def _heads_of_a_tile(self, most: int) -> int:
        """Query heads at a time, all of those that share a KV head; tl.dot wants 16 at least."""
        most = min(most, 32) if self.dtype == torch.float32 else most
        group_block = next_power_of_2(self.num_heads // self.num_kv_heads)
        return max(16, group_block, min(most, next_power_of_2(self.max_query_len) * group_block))

    def _tile(self, heads: int, blocks: KeyBlocks) -> QueryTile:
        group_block = next_power_of_2(self.num_heads // self.num_kv_heads)
        return QueryTile(heads // group_block, group_block, blocks.keys, blocks.num_stages)


register(Rule("attention.prompt", PLAIN, None, Queries._divided, (H200,)))


def grown(keys: int, steps: int) -> int:
    """Keys of a chunk that has grown so often: by a half and by a third in turn."""
    return (keys << steps // 2) * (3 if steps % 2 else 2) // 2


def query_class(queries: Queries, gpu: Gpu) -> Hashable:
    """Equal for batches that run the same compiled kernels."""
    tile, chunks = queries.divided(gpu)
    return tile, chunks and chunks.steps, request_block_of(queries.num_requests)


def request_block_of(num_requests: int) -> int:
    """Requests that a CTA looks at: few sizes, since each is a kernel that takes seconds to compile."""
    return _FEW_REQUESTS if num_requests <= _FEW_REQUESTS else max(_REQUESTS, next_power_of_2(num_requests))
