"""Graph memory from a saver, for `ostinato.graphs.GraphPool(memory=...)`."""

from __future__ import annotations

from typing import Any

import torch

from .blocks import Content
from .saver import MemorySaver


class GraphMemory:
    """All memory of graphs, under the tag `graphs`.

    Contents that must survive a pause (inputs, padding templates, bridges, results with their own memory) are
    restored. Intermediates are not: every replay writes them before it reads them.
    """

    def __init__(self, saver: MemorySaver) -> None:
        self._saver = saver
        self._pools: list[Any] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Bytes whose contents are restored, as uint8."""
        return self._saver.empty((nbytes,), torch.uint8, "graphs", Content.ONCE)

    def intermediates(self, nbytes: int) -> torch.Tensor:
        """Bytes that are undefined after a resume, as uint8; tapes use them where CUDA graphs use pools."""
        return self._saver.empty((nbytes,), torch.uint8, "graphs", Content.SCRATCH)

    def graph_pool(self) -> Any:
        """A pool of torch's allocator for captures; its memory is undefined after a resume."""
        self._pools.append(self._saver.graph_pool("graphs", Content.SCRATCH))
        return self._pools[-1]

    def drop_unused_pools(self) -> None:
        """Drop pools in which no graph lives any more, with their memory."""
        self._pools = [pool for pool in self._pools if not self._saver.drop_graph_pool(pool)]
