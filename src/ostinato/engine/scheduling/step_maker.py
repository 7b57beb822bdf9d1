"""Describes the steps that the scheduler has decided on, and counts them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .decode_batch import DecodeBatch
from .request import IntArray, Request, RequestRows
from .scheduled_step import PageUpdate, ScheduledStep

_DTYPES = (np.int32, np.int32, np.int32, np.bool_, np.int64)
"""Of rows, starts, counts, samples and tenancies."""


class StepMaker:
    """Makes `ScheduledStep`s from the numbers of the running requests."""

    def __init__(self, rows: RequestRows, max_running: int) -> None:
        self._state = rows
        self._num_steps = 0
        # Every steady step is described by these arrays, so they must never be written to.
        self._counts = {1: np.ones(max_running, dtype=np.int32)}
        self._max_running = max_running
        self._all_true = np.ones(max_running, dtype=bool)

    def step(
        self,
        requests: tuple[Request, ...],
        rows: IntArray,
        chunks: Sequence[tuple[Request, int]],
        joined: tuple[Request, ...],
        page_updates: tuple[PageUpdate, ...],
        shared_prefix: int,
        num_drafts: int = 0,
    ) -> ScheduledStep:
        """The requests in these rows decode, with this many drafts each; after them come the chunks of
        prompts, if there are no drafts."""
        assert not (num_drafts and chunks)
        state = self._state
        prompt_tokens: tuple[IntArray, ...] = ()
        if chunks:
            requests += tuple([request for request, _ in chunks])
            prompts, prompt_tokens = self._prompts(chunks)
        if not len(rows):
            rows, starts, counts, samples, tenancies = prompts
        else:
            counts, samples = self._counts_of(1 + num_drafts)[: len(rows)], self._all_true[: len(rows)]
            of_all: list[IntArray] = [rows, state.num_scheduled[rows], counts, samples, state.tenancy[rows]]
            if chunks:
                of_all = [np.concatenate(pair) for pair in zip(of_all, prompts, strict=True)]
            rows, starts, counts, samples, tenancies = of_all
        return ScheduledStep(
            index=self._next_index(),
            requests=requests,
            rows=rows,
            starts=starts,
            num_new_tokens=counts,
            samples=samples,
            prompt_tokens=prompt_tokens,
            joined=joined,
            page_updates=page_updates,
            tenancies=tenancies,
            shared_prefix=0 if chunks else shared_prefix,
            num_adapters=state.num_adapters(rows),
            num_drafts=num_drafts,
        )

    def _prompts(
        self, chunks: Sequence[tuple[Request, int]]
    ) -> tuple[tuple[IntArray, ...], tuple[IntArray, ...]]:
        """Rows, starts, counts, samples and tenancies of the chunks of prompts, and their tokens. Scalar by
        scalar: there is usually one chunk, and arrays of one element take longer."""
        state, numbers, tokens = self._state, [], []
        for request, count in chunks:
            row = request.row
            start = state.num_scheduled.item(row)
            samples = not request.is_embedding and state.num_promised.item(row) - start == count
            numbers.append((row, start, count, samples, state.tenancy.item(row)))
            tokens.append(state.token_ids[row, start : start + count].copy())
        columns = zip(zip(*numbers, strict=True), _DTYPES, strict=True)
        return tuple([np.array(column, dtype) for column, dtype in columns]), tuple(tokens)

    def steady(self, batch: DecodeBatch, page_updates: tuple[PageUpdate, ...]) -> ScheduledStep:
        """All of the batch, one token further, or as many more as it has drafts."""
        count = len(batch.rows)
        return ScheduledStep(
            index=self._next_index(),
            requests=batch.requests,
            rows=batch.rows,
            starts=batch.advance(),
            num_new_tokens=self._counts_of(1 + batch.num_drafts)[:count],
            samples=self._all_true[:count],
            prompt_tokens=(),
            joined=(),
            page_updates=page_updates,
            tenancies=batch.tenancies,
            shared_prefix=batch.shared_prefix,
            num_adapters=batch.num_adapters,
            num_drafts=batch.num_drafts,
        )

    def _counts_of(self, each: int) -> IntArray:
        if each not in self._counts:
            self._counts[each] = np.full(self._max_running, each, dtype=np.int32)
        return self._counts[each]

    def _next_index(self) -> int:
        self._num_steps += 1
        return self._num_steps - 1
