"""What a step takes of a pool of torch's caching allocator on a GPU, without a GPU.

The step runs on tensors without data; a mode sees which come and go. The pool deals with them as the
allocator does with those of more than 1 MiB: the smallest free block that is large enough serves, what is
left of it becomes a block of its own, and free neighbours become one again.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MIB = 1 << 20


@dataclass(eq=False)
class Block:
    """A piece of a segment."""

    segment: int
    start: int
    size: int
    is_free: bool = True


class Pool:
    """Segments as they are taken from the device, each cut into blocks."""

    def __init__(self) -> None:
        self.bytes = 0
        self._blocks: list[Block] = []
        self._segments = 0

    def allocate(self, size: int) -> Block:
        """Find a block of this size, or take a new segment."""
        fitting = [block for block in self._blocks if block.is_free and block.size >= size]
        block = min(fitting, key=lambda block: (block.size, block.segment, block.start), default=None)
        if block is None:
            taken = 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            block = Block(self._segments, 0, taken)
            self._segments += 1
            self.bytes += taken
            self._blocks.append(block)
        if block.size - size > MIB:
            self._blocks.append(Block(block.segment, block.start + size, block.size - size))
            block.size = size
        block.is_free = False
        return block

    def release(self, block: Block) -> None:
        """Give a block back and join it with free neighbours."""
        block.is_free = True
        for first in list(self._blocks):
            for second in list(self._blocks):
                is_next = first.segment == second.segment and first.start + first.size == second.start
                if is_next and first.is_free and second.is_free and block in (first, second):
                    first.size += second.size
                    self._blocks.remove(second)
                    block = first


class PooledAllocations(TorchDispatchMode):
    """Puts every storage that is made inside into a pool for as long as a tensor refers to it."""

    def __init__(self, others: Iterable[torch.Tensor]) -> None:
        """`others`: tensors that are there already, and their views, do not count."""
        super().__init__()
        self.pool = Pool()
        self.most_alive = self._alive = 0
        self._others = {tensor.untyped_storage()._cdata for tensor in others}
        self._tensors: dict[int, set[int]] = {}
        self._blocks: dict[int, Block] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() > MIB:
                self._see(tensor)
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        storage, size = tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()
        if storage in self._others or id(tensor) in self._tensors.get(storage, ()):
            return
        if storage not in self._tensors:
            block = self.pool.allocate(size)
            self._alive += size
            self.most_alive = max(self.most_alive, self._alive)
            self._tensors[storage] = set()
            self._blocks[storage] = block
        self._tensors[storage].add(id(tensor))
        weakref.finalize(tensor, self._forget, storage, id(tensor), size)

    def _forget(self, storage: int, tensor: int, size: int) -> None:
        self._tensors[storage].discard(tensor)
        if not self._tensors[storage]:
            del self._tensors[storage]
            self.pool.release(self._blocks.pop(storage))
            self._alive -= size
