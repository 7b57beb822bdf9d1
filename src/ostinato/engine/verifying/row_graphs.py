"""The graphs that write changes of rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ostinato.graphs import BatchShape, CapturedGraph

from ..stepping.device_rows import RESERVED_CELLS, DeviceRows
from .outcome import Check


def check_row_graph(
    rows: DeviceRows, graph: CapturedGraph, name: str, generator: np.random.Generator
) -> Iterator[Check]:
    """Send random values to random cells through one graph; everything else must stay."""
    with rows.unchanged():  # other graphs depend on the rows, above all on row 0
        yield from _scattered(rows, graph, name, generator)


def _scattered(
    rows: DeviceRows, graph: CapturedGraph, name: str, generator: np.random.Generator
) -> Iterator[Check]:
    full, num_cells = graph.descriptor.num_reqs, rows.cells.numel()
    for kind, wanted in (("plain", full), ("plain", max(1, full // 3)), ("poison", max(1, full // 3))):
        count = min(wanted, num_cells - RESERVED_CELLS)
        places = RESERVED_CELLS + generator.permutation(num_cells - RESERVED_CELLS)[:count]
        values = generator.integers(-(1 << 31), 1 << 31, count).astype(np.int32)
        expected = rows.cells.cpu().clone()
        expected[torch.from_numpy(places)] = torch.from_numpy(values)
        buffers, shape = rows.scatter.buffers, BatchShape.decode(count)
        batch = {"places": places, "values": values}
        buffers.fill(batch, shape, graph.descriptor, poison=kind == "poison")
        rows.scatter.launch(graph)
        wrong = (rows.cells.cpu() != expected)[RESERVED_CELLS:].sum()
        yield Check(name, f"{count} cells", kind, "cells", float(wrong), 0)
