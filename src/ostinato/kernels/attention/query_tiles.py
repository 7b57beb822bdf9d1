"""How attention of prompts and mixed batches divides its work: by what is known of rung and GPU."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..gpu import Gpu
from ..host_sizes import cdiv, next_power_of_2
from .shared_memory import KeyBlocks, key_blocks

_PROGRAMS = 2
"""On a multiprocessor at a time, where contexts are cut: they hide each other's gaps."""
_LEAST_KEYS = 256
_KEYS_PER_QUERY = 8
"""Of a chunk, at least, for each query head of a tile: the part that it leaves has 4 bytes an element, which
are written and read, where a key and its value have 4 together. So parts move a quarter of what keys do."""
_LEAST_PARTS, _MOST_PARTS = 2, 64
_MOST_PART_BYTES = 40 << 20
"""Of all parts together: L2 holds most of them."""
_FEW_REQUESTS, _REQUESTS = 32, 256
"""What programs look at where they know no more: one for each lane of a warp, as many as usually run."""


@dataclass(frozen=True)
class QueryTile:
    """How a program works; few of them, so that few variants are compiled."""

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
        """A program's tile; contexts are cut if a program for each tile would leave multiprocessors idle."""
        # Of wide heads fewer: a program that takes tiles in turn has fewer registers for sums.
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
        # As many as there are programs for the tiles of one request: a second round is as long as the first.
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


def grown(keys: int, steps: int) -> int:
    """Keys of a chunk that has grown so often: by a half and by a third in turn."""
    return (keys << steps // 2) * (3 if steps % 2 else 2) // 2


def query_class(queries: Queries, gpu: Gpu) -> Hashable:
    """Equal for batches that run the same compiled kernels."""
    tile, chunks = queries.divided(gpu)
    return tile, chunks and chunks.steps, request_block_of(queries.num_requests)


def request_block_of(num_requests: int) -> int:
    """Requests that a program looks at: few sizes, since each is a kernel that takes seconds to compile."""
    return _FEW_REQUESTS if num_requests <= _FEW_REQUESTS else max(_REQUESTS, next_power_of_2(num_requests))
