"""Graphs whose only input is row numbers: drafts, and acceptance after other graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from ostinato.graphs import (
    BatchShape,
    CaptureOptions,
    CudaGraphRunner,
    Dispatcher,
    Field,
    GraphKey,
    GraphMode,
    InputBuffers,
    Results,
    capture_keys,
)
from ostinato.graphs.capturing.recorder import Step

from ..scheduling.request import IntArray
from .target import Target

ROWS = "req_rows"
"""Their one input."""


def row_graphs(
    target: Target,
    step: Step,
    lengths: Sequence[int],
    *,
    most: int,
    kernels_of: Callable[[GraphKey], Hashable],
    state: Mapping[str, Tensor] | None = None,
    padding: bool = True,
) -> CudaGraphRunner:
    """A runner of `step(req_rows, descriptor)` over uniform batches with up to `most` tokens per request,
    captured for `lengths` of them. `state`: what a trial must not change, besides row 0."""
    config, ladder = target.config, target.config.verify_ladder
    mode = GraphMode.NONE if config.graph_mode is GraphMode.NONE else GraphMode.FULL_DECODE_ONLY
    return CudaGraphRunner(
        step,
        InputBuffers(
            (Field(ROWS, torch.int32, per="request"),),
            max_tokens=ladder.limit * most,
            max_reqs=ladder.limit,
            device=config.device,
            allocate=target.pool.allocate,
        ),
        [
            key
            for length in lengths
            for key in capture_keys(mode, ladder, None, query_len=length, max_reqs=ladder.limit)
        ],
        dispatcher=Dispatcher(mode, padding=padding),
        pool=target.pool,
        options=CaptureOptions(warmups=config.warmups, freeze_gc=False),
        state=state or {},
        kernels_of=kernels_of,
        results=Results.UNGUARDED,
    )


class HeldRows:
    """Runs such graphs; while the rows are the very same array, without sending them again."""

    def __init__(self, graphs: CudaGraphRunner) -> None:
        self._graphs = graphs
        self._held: tuple[IntArray | None, int] = (None, 0)

    def run(self, rows: IntArray, length: int) -> None:
        """Launch for these rows, with `length` tokens each."""
        shape = BatchShape.decode(len(rows), length)
        # If this fails midway, the contents of the inputs are unknown.
        (of, count), self._held = self._held, (None, 0)
        if of is rows and count == length and self._graphs.can_rerun(shape):
            self._graphs.rerun(shape)
        else:
            self._graphs.run({ROWS: rows}, shape)
        self._held = rows, length
