"""Memory of graphs from a saver: what `ostinato.graphs.GraphPool(memory=...)` takes."""

from __future__ import annotations

from typing import Any

import torch

from .blocks import Content
from .saver import MemorySaver


class GraphMemory:
    """Everything under the tag `graphs`.

    What graphs find as it was left (inputs, padding templates, bridges, results with memory of their own) is
    restored. Intermediates are written by every replay before it reads them.
    """

    def __init__(self, saver: MemorySaver) -> None:
        self._saver = saver
        self._pools: list[Any] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        """So many bytes that are restored, as uint8."""
        return self._saver.empty((nbytes,), torch.uint8, "graphs", Content.ONCE)

    def intermediates(self, nbytes: int) -> torch.Tensor:
        """So many bytes that come back undefined, as uint8: what tapes have where CUDA graphs have pools."""
        return self._saver.empty((nbytes,), torch.uint8, "graphs", Content.SCRATCH)

    def graph_pool(self) -> Any:
        """A pool of torch's allocator for captures, of memory that comes back undefined."""
        self._pools.append(self._saver.graph_pool("graphs", Content.SCRATCH))
        return self._pools[-1]

    def drop_unused_pools(self) -> None:
        """Pools that no graph lives in any more go, with their memory."""
        self._pools = [pool for pool in self._pools if not self._saver.drop_graph_pool(pool)]
