"""The memory that all graphs of a pool share, and what is known about it."""

import threading
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef

from ..backends import Backend, PoolMemory, backend_for
from ..errors import ConfigError


class Memory(Protocol):
    """Where the memory of graphs comes from, if not from torch: what a memory saver implements."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """So many bytes as uint8 that keep their contents: input buffers, padding templates, bridges, results
        with memory of their own."""
        ...

    def intermediates(self, nbytes: int) -> torch.Tensor:
        """So many bytes as uint8 that every replay writes before it reads them: the slabs of tapes."""
        ...

    def graph_pool(self) -> Any:
        """The handle of a pool of torch's allocator for captures on CUDA, as `graph_pool_handle` makes it."""
        ...

    def drop_unused_pools(self) -> None:
        """Pools that were handed out and that no graph lives in any more may go."""
        ...


class Occupant(Protocol):
    """Whoever has graphs in a pool and can record them again."""

    def take_down(self) -> Any:
        """Let all graphs go; what `put_up` needs to know."""
        ...

    def put_up(self, standing: Any) -> None:
        """Record them again."""
        ...


class Lent:
    """Results handed out to code that may differentiate through them."""

    def __init__(self) -> None:
        self.outputs: Sequence[torch.Tensor] = ()

    def overwrite(self) -> None:
        """They are about to be overwritten: what autograd saved of them is void, and it will say so."""
        if self.outputs:
            increment_version(self.outputs)
            self.outputs = ()


class GraphPool:
    """One shared memory for any number of graphs, with a budget.

    Sharing is sound because replays are ordered: a graph's intermediates and outputs are dead once another
    graph runs. Capturing the largest graph first lets the smaller ones fit into its memory.
    """

    def __init__(
        self,
        device: torch.device | str = "cuda",
        *,
        budget: int | None = None,
        memory: Memory | None = None,
    ) -> None:
        """`budget`: most bytes that graphs may take together; those that it does not pay for are given up.

        `memory`: where all of it comes from; default: torch's allocator.
        """
        if budget is not None and budget <= 0:
            raise ConfigError(f"the pool's budget must be a positive number of bytes, not {budget}")
        self.backend: Backend = backend_for(device)
        self.budget = budget
        self.generation = 0
        """Counts replays; an output of an earlier generation has been overwritten."""
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        """The captured graphs that live in the pool, of whatever runner."""
        self.owner: threading.Thread | None = None
        """The thread whose results a replay overwrites, where wrappers care."""
        self._source = memory
        self._memory: PoolMemory | None = None
        self._beside: dict[StorageWeakRef, int] = {}
        self._occupants: list[weakref.ref[Occupant]] = []
        self.lent = Lent()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """So many bytes on the pool's device, as uint8: what there is whether or not there are graphs."""
        with torch.inference_mode(False):
            if self._source is not None:
                return self._source.allocate(nbytes)
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def allocate_for_graphs(self, nbytes: int) -> torch.Tensor:
        """So many bytes as uint8 that graphs use beside their intermediates; counted while they live."""
        memory = self.allocate(nbytes)
        self._beside[StorageWeakRef(memory.untyped_storage())] = nbytes
        return memory

    @property
    def device(self) -> torch.device:
        """The device the pool lives on."""
        return self.backend.device

    @property
    def memory(self) -> PoolMemory:
        """The backend's memory, made on first use."""
        if self._memory is None:
            self._memory = self.backend.new_memory(self._source)
        return self._memory

    @property
    def bytes(self) -> int:
        """Bytes that graphs have taken from the device."""
        return (self._memory.bytes if self._memory is not None else 0) + self.bytes_beside

    @property
    def bytes_beside(self) -> int:
        """Of these, bridges and results with memory of their own."""
        self._beside = {ref: size for ref, size in self._beside.items() if not ref.expired()}
        return sum(self._beside.values())

    @property
    def over_budget(self) -> bool:
        """Whether the pool has grown beyond its budget."""
        return self.budget is not None and self.bytes > self.budget

    def overwrite(self) -> None:
        """What was handed out is about to be overwritten: autograd must not use it any more, nor guards."""
        self.generation += 1
        self.lent.overwrite()

    def shrink_if_unused(self) -> None:
        """Give the memory back when no graph lives in it (after the largest one did not fit)."""
        if not self.graphs and self._memory is not None:
            self._memory = None
            self.lent.outputs = ()
            if self._source is not None:
                self._source.drop_unused_pools()

    def join(self, occupant: Occupant) -> None:
        """Somebody will capture graphs here."""
        self._occupants = [ref for ref in self._occupants if ref() not in (None, occupant)]
        self._occupants.append(weakref.ref(occupant))

    def capture_anew(self) -> None:
        """Record all graphs once more, in new memory: a graph that was given up had made the old one grow.

        Only inside `capture_gate()`. No part of it can be given back as long as there are graphs: the device
        does not know which of it they use.
        """
        living = [occupant for ref in self._occupants if (occupant := ref()) is not None]
        standing = [occupant.take_down() for occupant in living]
        self.overwrite()
        self.shrink_if_unused()
        self.backend.release_unused()
        for occupant, known in zip(living, standing, strict=True):
            occupant.put_up(known)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a pool of graphs cannot be copied or pickled: graphs are addresses of this process")
