"""The memory that all graphs of a pool share, and what is known about it."""

import weakref
from typing import Any

import torch

from ..backends import Backend, PoolMemory, backend_for
from ..errors import ConfigError


class GraphPool:
    """One shared memory for any number of graphs, with a budget.

    Sharing is sound because replays are ordered: a graph's intermediates and outputs are dead once another
    graph runs. Capturing the largest graph first lets the smaller ones fit into its memory.
    """

    def __init__(self, device: torch.device | str = "cuda", *, budget: int | None = None) -> None:
        """`budget`: most bytes the pool may take; a graph that exceeds it is given up.

        What the pool grew for that graph stays with it as long as other graphs live in the pool.
        """
        if budget is not None and budget <= 0:
            raise ConfigError(f"the pool's budget must be a positive number of bytes, not {budget}")
        self.backend: Backend = backend_for(device)
        self.budget = budget
        self.generation = 0
        """Counts replays; an output of an earlier generation has been overwritten."""
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        """The captured graphs that live in the pool, of whatever runner."""
        self._memory: PoolMemory | None = None

    @property
    def device(self) -> torch.device:
        """The device the pool lives on."""
        return self.backend.device

    @property
    def memory(self) -> PoolMemory:
        """The backend's memory, made on first use."""
        if self._memory is None:
            self._memory = self.backend.new_memory()
        return self._memory

    @property
    def bytes(self) -> int:
        """Bytes taken from the device."""
        return self._memory.bytes if self._memory is not None else 0

    @property
    def over_budget(self) -> bool:
        """Whether the pool has grown beyond its budget."""
        return self.budget is not None and self.bytes > self.budget

    def shrink_if_unused(self) -> None:
        """Give the memory back when no graph lives in it (after the largest one did not fit)."""
        if not self.graphs:
            self._memory = None
