"""How attention of prompts and mixed batches divides its work: by what is known of rung and GPU."""

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from ..gpu import Gpu
from ..host_sizes import cdiv, next_power_of_2
from .shared_memory import KeyBlocks, key_blocks

_PROGRAMS = 2
"""On a multiprocessor at a time, where contexts are cut: they hide each other's gaps."""
_LEAST_KEYS = 256
_PARTS = 32
"""Of the longest context, about: a chunk of few blocks of keys ends before its copies are on their way (16
tokens at 32k take 86 us with 128 parts, 65 with 64, 49 with 32; at 8k 24, 27 and 31)."""
_KEYS_PER_QUERY = 8
"""Of a chunk, at least, for each query head of a tile: the part that it leaves has 4 bytes an element, which
are written and read, where a key and its value have 4 together. So parts move a quarter of what keys do."""
_MOST_PART_BYTES = 40 << 20
"""Of all parts together: L2 holds most of them, and a limit that is a little above a power of two still has
the chunks of that power."""


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
    """Contexts are cut at multiples of this..."""
    grow: bool
    """...or, at their beginning, of a quarter and of a half of it: see `chunk_of` in triton_queries."""
    parts: int
    """Chunks that a token sees at most."""
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

    def divided(self, gpu: Gpu) -> tuple[QueryTile, Chunks | None]:
        """A program's tile; contexts are cut if a program for each tile would leave multiprocessors idle."""
        # Of wide heads fewer: a program that takes tiles in turn has fewer registers for sums.
        heads = self._heads_of_a_tile(64 if self.head_dim <= 128 else 32)
        blocks = key_blocks(self.dtype, self.head_dim, heads, (5, 4), gpu, _PROGRAMS)
        tile = self._tile(heads, blocks)
        tiles = cdiv(self.num_tokens, tile.query_block) * self.num_kv_heads
        seen = min(self.max_context, self.window or self.max_context)
        keys = max(_LEAST_KEYS, _KEYS_PER_QUERY * heads, 1 << max(1, seen // _PARTS).bit_length() - 1)
        if _PROGRAMS * tiles > gpu.multiprocessors or seen <= keys:
            heads = self._heads_of_a_tile(64)
            return self._tile(heads, key_blocks(self.dtype, self.head_dim, heads, (4,), gpu, 1)), None
        # A window may begin anywhere: its chunks are all alike.
        grow = keys >= 4 * _LEAST_KEYS and not self.window
        part_bytes = self.num_tokens * self.num_heads * self.head_dim * 4
        while (parts := self._parts(keys, grow)) > 2 and parts * part_bytes > _MOST_PART_BYTES:
            keys *= 2
        units = (tiles + self.num_requests * self.num_kv_heads) * parts
        resident = min(_PROGRAMS, gpu.most_programs(blocks.shared_bytes(self.dtype, self.head_dim, heads)))
        return tile, Chunks(keys, grow, parts, min(units, resident * gpu.multiprocessors))

    def _parts(self, keys: int, grow: bool) -> int:
        """Chunks that a token sees at most: a window may begin and end anywhere in one."""
        if not self.window or self.window >= self.max_context:
            return cdiv(self.max_context, keys) + (5 if grow else 0)
        return cdiv(self.window - 1, keys) + 1

    def _heads_of_a_tile(self, most: int) -> int:
        """Query heads at a time, all of those that share a KV head; tl.dot wants 16 at least."""
        most = min(most, 32) if self.dtype == torch.float32 else most
        group_block = next_power_of_2(self.num_heads // self.num_kv_heads)
        return max(16, group_block, min(most, next_power_of_2(self.max_query_len) * group_block))

    def _tile(self, heads: int, blocks: KeyBlocks) -> QueryTile:
        group_block = next_power_of_2(self.num_heads // self.num_kv_heads)
        return QueryTile(heads // group_block, group_block, blocks.keys, blocks.num_stages)


def query_class(queries: Queries, gpu: Gpu) -> Hashable:
    """Equal for batches that run the same compiled kernels."""
    tile, chunks = queries.divided(gpu)
    return tile, chunks and chunks.grow, request_block_of(queries.num_requests)


def request_block_of(num_requests: int) -> int:
    """Requests that a program looks at."""
    return max(16, next_power_of_2(num_requests))
