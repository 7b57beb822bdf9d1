"""The memory that all graphs of a pool share."""

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
    """Provides graph memory instead of torch; a memory saver implements it."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Bytes, as uint8, that keep their contents: input buffers, padding templates, bridges, strong
        results."""
        ...

    def intermediates(self, nbytes: int) -> torch.Tensor:
        """Bytes, as uint8, that every replay writes before it reads them: the slabs of tapes."""
        ...

    def graph_pool(self) -> Any:
        """Handle of a pool of torch's allocator for captures on CUDA, like that of `graph_pool_handle`."""
        ...

    def drop_unused_pools(self) -> None:
        """Drop pools that were handed out and in which no graph lives any more."""
        ...


class Occupant(Protocol):
    """An owner of graphs in a pool that can record them again."""

    def take_down(self) -> Any:
        """Drop all graphs and return what `put_up` needs to know."""
        ...

    def put_up(self, standing: Any) -> None:
        """Record them again."""
        ...


class Lent:
    """Results handed out to callers, who may differentiate through them."""

    def __init__(self) -> None:
        self.outputs: Sequence[torch.Tensor] = ()
        self.generation = 0
        """Counts how often they were overwritten; those of earlier generations are gone."""

    def overwrite(self) -> None:
        """Call before they are overwritten: autograd and guards then refuse to use the old ones."""
        self.generation += 1
        if self.outputs:
            increment_version(self.outputs)
            self.outputs = ()


class GraphPool:
    """Memory shared by any number of graphs, with an optional budget.

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
        """`budget`: maximum bytes that all graphs take together; graphs that do not fit are dropped.

        `memory`: where the memory comes from; default: torch's allocator.
        """
        if budget is not None and budget <= 0:
            raise ConfigError(f"the pool's budget must be a positive number of bytes, not {budget}")
        self.backend: Backend = backend_for(device)
        self.budget = budget
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        """The captured graphs in the pool, of all runners."""
        self.causes_told: set[Any] = set()
        """Why graphs were given up, as far as it was logged."""
        self.owner: threading.Thread | None = None
        """The thread whose guarded results a replay overwrites; used by wrappers."""
        self._source = memory
        self._memory: PoolMemory | None = None
        self._beside: dict[StorageWeakRef, int] = {}
        self._occupants: list[weakref.ref[Occupant]] = []
        self._apart: weakref.WeakSet[GraphPool] = weakref.WeakSet()
        self.lent = Lent()

    def apart(self) -> "GraphPool":
        """Another pool with memory from the same source, for graphs whose memory no others may touch. It is
        counted here."""
        pool = GraphPool(self.device, memory=self._source)
        self._apart.add(pool)
        return pool

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Bytes on the pool's device, as uint8, for purposes that do not depend on graphs."""
        with torch.inference_mode(False):
            if self._source is not None:
                return self._source.allocate(nbytes)
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def allocate_for_graphs(self, nbytes: int) -> torch.Tensor:
        """Bytes, as uint8, that graphs use besides their intermediates; counted as long as they live."""
        memory = self.allocate(nbytes)
        self._beside[StorageWeakRef(memory.untyped_storage())] = nbytes
        return memory

    @property
    def device(self) -> torch.device:
        """The pool's device."""
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
        own = self._memory.bytes if self._memory is not None else 0
        return own + self.bytes_beside + sum(pool.bytes for pool in self._apart)

    @property
    def bytes_beside(self) -> int:
        """Of these, the bytes of bridges and strong results."""
        self._beside = {ref: size for ref, size in self._beside.items() if not ref.expired()}
        return sum(self._beside.values())

    @property
    def over_budget(self) -> bool:
        """Whether the pool has grown beyond its budget."""
        return self.budget is not None and self.bytes > self.budget

    @property
    def generation(self) -> int:
        """Number of replays; outputs of earlier generations have been overwritten."""
        return self.lent.generation

    def overwrite(self) -> None:
        """Call before results are overwritten: autograd and guards then refuse to use the old ones."""
        self.lent.overwrite()

    def shrink_if_unused(self) -> None:
        """Free the memory if no graph lives in it, for example after the largest one did not fit."""
        if not self.graphs and self._memory is not None:
            self._memory = None
            self.lent.outputs = ()
            if self._source is not None:
                self._source.drop_unused_pools()

    def join(self, occupant: Occupant) -> None:
        """Register an owner of graphs before it captures here."""
        self._occupants = [ref for ref in self._occupants if ref() not in (None, occupant)]
        self._occupants.append(weakref.ref(occupant))

    def capture_anew(self) -> None:
        """Record all graphs again in new memory, because a graph that was dropped had made the old one grow.

        Only inside `capture_gate()`. No part of the old memory can be freed while graphs live in it, because
        the device does not know which part they use.
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
