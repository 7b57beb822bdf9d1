"""Steps made up for a graph: full ones, and ones that are mostly padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ostinato.graphs import BatchDescriptor

from ..scheduling.request import IntArray, Request
from ..scheduling.scheduled_step import ScheduledStep
from .made_requests import MadeRequest

_MOST_BATCHES = 4
"""Small graphs see the requests in this many batches, large ones in fewer."""
ENOUGH_REQUESTS = 6
"""Of different lengths, also for graphs of one request."""


@dataclass(frozen=True)
class Part:
    """One request's part of a step: the tokens at positions [start, end)."""

    request: MadeRequest
    start: int
    end: int
    is_decode: bool
    """It continues from the token that the device has in its row."""

    @property
    def count(self) -> int:
        """Tokens in the step."""
        return self.end - self.start


@dataclass(frozen=True)
class MadeStep:
    """One step of a graph: decoding requests first, as everywhere."""

    name: str
    parts: tuple[Part, ...]
    shared_prefix: int = 0
    """Positions that all requests have on the same pages, and that attention should read once."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(part.count for part in self.parts)

    @property
    def num_drafts(self) -> int:
        """Drafts of each request: a decoding request has a single token otherwise."""
        return max(part.count - 1 if part.is_decode else 0 for part in self.parts)

    def up_to(self, place: int) -> MadeStep:
        """The same, with each request's tokens only up to this place."""
        parts = [replace(part, end=part.start + 1 + place) for part in self.parts]
        return replace(self, parts=tuple(parts))

    def __str__(self) -> str:
        contexts = [part.end for part in self.parts]
        return (
            f"{self.name}, {self.num_tokens} tokens of {len(self.parts)} requests, "
            f"contexts {min(contexts)} to {max(contexts)}"
        )

    def scheduled(self, rows: Sequence[int], requests: Sequence[Request]) -> ScheduledStep:
        """The step as the scheduler would pass it, with the requests in these rows."""
        prompts = [part for part in self.parts if not part.is_decode]
        return ScheduledStep(
            index=0,
            requests=tuple(requests),
            rows=np.array(rows, dtype=np.int32),
            starts=np.array([part.start for part in self.parts], dtype=np.int32),
            num_new_tokens=np.array([part.count for part in self.parts], dtype=np.int32),
            samples=np.ones(len(self.parts), dtype=bool),
            prompt_tokens=tuple(part.request.tokens[part.start : part.end] for part in prompts),
            joined=(),
            page_updates=(),
            tenancies=np.zeros(len(self.parts), dtype=np.int64),
            num_drafts=self.num_drafts,
        )

    def slots(self) -> IntArray:
        """int64 [T]: where the keys and values of its tokens belong."""
        return np.concatenate([part.request.slots(part.start, part.end) for part in self.parts])

    def stale_slots(self) -> IntArray:
        """Those slots and the ones after them on the requests' pages: nothing valid before the step."""
        return np.concatenate([part.request.slots(part.start, part.request.room) for part in self.parts])


def decode_steps(requests: Sequence[MadeRequest], graph: BatchDescriptor) -> Iterator[MadeStep]:
    """Steps with as many tokens per request as the graph is for."""
    count = graph.query_len or 1
    usable = [request for request in requests if request.first_own + count <= _end(request, graph)]
    if graph.cascade:  # those on the longest's pages; without any, a prefix of length 0 serves
        usable = [request for request in usable if request.first_own] or usable
    full = min(graph.num_reqs, len(usable))
    for at in range(_batches(full)):
        yield _decode("full", _window(usable, at * full, full), graph)
    if graph.num_reqs > 1:
        few = max(1, full // 3)
        yield _decode("mostly padding", _window(usable, 1, few), graph)


def mixed_steps(requests: Sequence[MadeRequest], graph: BatchDescriptor) -> Iterator[MadeStep]:
    """Steps of prompts and single tokens."""
    usable = [request for request in requests if request.first_own < _end(request, graph)]
    tokens = graph.num_tokens
    most = min(graph.num_reqs, len(usable))
    few = min(most, max(1, tokens // 8))
    for at in range(_batches(few)):
        yield _mixed("few requests", _window(usable, at * few, few), graph, tokens)
    if few < most:
        yield _mixed("all requests", _window(usable, 0, most), graph, tokens)
    if tokens > 1:
        part = max(1, tokens // 3)
        yield _mixed("mostly padding", _window(usable, 1, min(most, max(1, part // 6))), graph, part)


def _decode(name: str, requests: Sequence[MadeRequest], graph: BatchDescriptor) -> MadeStep:
    ends = [_end(request, graph) for request in requests]
    pairs = zip(requests, ends, strict=True)
    count = graph.query_len or 1
    parts = tuple(Part(request, end - count, end, is_decode=True) for request, end in pairs)
    shared = min(request.first_own for request in requests) if graph.cascade else 0
    return MadeStep(name, parts, shared)


def _mixed(name: str, requests: Sequence[MadeRequest], graph: BatchDescriptor, tokens: int) -> MadeStep:
    """A third of the requests decode; the others have prompts, new or continued, that fill the step."""
    num_decodes = len(requests) // 3
    decodes = [Part(one, _end(one, graph) - 1, _end(one, graph), True) for one in requests[:num_decodes]]
    prompts = []
    left, waiting = tokens - num_decodes, len(requests) - num_decodes
    # Those with the most tokens last: they take what the others leave.
    for at, request in enumerate(sorted(requests[num_decodes:], key=lambda one: one.length - one.first_own)):
        end = _end(request, graph)
        # Every third prompt continues in a later step.
        if at % 3 == 2:
            end = max(request.first_own + 1, 2 * end // 3)
        waiting -= 1
        count = min(end - request.first_own, left - waiting if waiting else left)
        if waiting:
            count = min(count, max(1, left // (waiting + 1)))
        prompts.append(Part(request, end - count, end, is_decode=False))
        left -= count
    return MadeStep(name, (*decodes, *prompts))


def _end(request: MadeRequest, graph: BatchDescriptor) -> int:
    """How much of the request a graph can take."""
    return request.length if graph.context is None else min(request.length, graph.context)


def _batches(size: int) -> int:
    return max(1, min(_MOST_BATCHES, -(-ENOUGH_REQUESTS // size)))


def _window(requests: Sequence[MadeRequest], first: int, count: int) -> list[MadeRequest]:
    return [requests[(first + at) % len(requests)] for at in range(count)]
