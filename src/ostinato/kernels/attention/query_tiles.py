"""How attention of prompts and mixed batches divides its work: by what is known of the rung, and of the GPU."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache

import torch

from ..host_sizes import cdiv, next_power_of_2
from .backend import BackendError

_PROGRAMS = 2
"""On a multiprocessor at a time, where contexts are cut: they hide each other's gaps."""
_LEAST_KEYS = 256
_KEYS_PER_ROW = 8
"""Of a chunk, at least: a row's part is 4 bytes an element, written and read, where a key and its value have
4 together, so that parts move at most a quarter of what the keys do."""
_MOST_PART_BYTES = 32 << 20
"""Of all parts together, so that L2 holds most of them."""
_RESERVED_BYTES = 1 << 10
"""Of a program's shared memory, by CUDA."""


@dataclass(frozen=True)
class Gpu:
    """What tiles follow from."""

    multiprocessors: int
    shared_bytes: int
    """Of a multiprocessor."""
    most_shared_bytes: int
    """Of a program."""


H200 = Gpu(132, 228 << 10, 227 << 10)


@cache
def gpu_of(device: torch.device) -> Gpu:
    """Of a device; kernels that are interpreted work as on the GPU that they were measured on."""
    if device.type != "cuda":
        return H200
    found = torch.cuda.get_device_properties(device)
    return Gpu(
        found.multi_processor_count,
        found.shared_memory_per_multiprocessor,
        found.shared_memory_per_block_optin,
    )


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
    """Contexts are cut at multiples of this."""
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
        most_rows = 64 if self.dtype != torch.float32 and self.head_dim <= 128 else 32
        tile = self._tile(most_rows, (5, 4), gpu, _PROGRAMS)
        tiles = cdiv(self.num_tokens, tile.query_block) * self.num_kv_heads
        seen = min(self.max_context, self.window or self.max_context)
        keys = max(_LEAST_KEYS, _KEYS_PER_ROW * tile.query_block * tile.group_block)
        if tiles > gpu.multiprocessors or seen <= keys:
            return self._tile(32 if self.dtype == torch.float32 else 64, (4,), gpu, 1), None
        part_bytes = self.num_tokens * self.num_heads * self.head_dim * 4
        while (parts := self._parts(keys)) > 2 and parts * part_bytes > _MOST_PART_BYTES:
            keys *= 2
        units = (tiles + self.num_requests * self.num_kv_heads) * parts
        resident = min(_PROGRAMS, gpu.shared_bytes // (self.shared_bytes(tile) + _RESERVED_BYTES))
        return tile, Chunks(keys, parts, min(units, resident * gpu.multiprocessors))

    def _parts(self, keys: int) -> int:
        """Chunks that a token sees at most: a window may begin and end anywhere in one."""
        if not self.window or self.window >= self.max_context:
            return cdiv(self.max_context, keys)
        return cdiv(self.window - 1, keys) + 1

    def _tile(self, most_rows: int, stages: tuple[int, ...], gpu: Gpu, programs: int) -> QueryTile:
        """The largest tile, with most on its way, of which so many have room; else one, as small as it is."""
        room = min(gpu.most_shared_bytes, gpu.shared_bytes // programs - _RESERVED_BYTES)
        # float32 products need more registers.
        key_blocks, stages = ((32, 16), (2,)) if self.dtype == torch.float32 else ((64, 32, 16), stages)
        group_block = next_power_of_2(self.num_heads // self.num_kv_heads)
        query_block = max(1, min(most_rows // group_block, next_power_of_2(self.max_query_len)))
        query_block = max(query_block, cdiv(16, group_block))  # tl.dot wants 16 rows at least
        tiles = [
            QueryTile(query_block, group_block, key_block, num_stages)
            for key_block in key_blocks
            for num_stages in stages
        ]
        tile = next((tile for tile in tiles if self.shared_bytes(tile) <= room), tiles[-1])
        if self.shared_bytes(tile) > gpu.most_shared_bytes:
            raise BackendError(
                f"triton attention of heads of {self.head_dim} in {self.dtype} takes "
                f"{self.shared_bytes(tile)} bytes of shared memory and this GPU has {gpu.most_shared_bytes} "
                "for a program: use the torch backend"
            )
        return tile

    def shared_bytes(self, tile: QueryTile) -> int:
        """That a program takes at most: queries, blocks of keys and values on their way, sums."""
        row = max(16, next_power_of_2(self.head_dim)) * self.dtype.itemsize
        blocks = max(1, tile.num_stages - 2)
        return row * (tile.query_block * tile.group_block + 2 * blocks * tile.key_block) + _RESERVED_BYTES


def query_class(queries: Queries, gpu: Gpu) -> Hashable:
    """Equal for batches that run the same compiled kernels."""
    tile, chunks = queries.divided(gpu)
    return tile, chunks is None, request_block_of(queries.num_requests)


def request_block_of(num_requests: int) -> int:
    """Requests that a program looks at."""
    return max(16, next_power_of_2(num_requests))
