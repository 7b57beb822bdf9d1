"""Requests, adapters and steps that a verification makes up, and runs on pages and slots that it borrows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ostinato.graphs import BatchDescriptor
from ostinato.kernels.constants import PAGE_SIZE
from ostinato.kernels.lora import NO_ADAPTER, LowRank
from ostinato.models.adapters.adapter import Adapter
from ostinato.models.adapters.reading import adaptable
from ostinato.models.adapters.stacks import AdapterStacks
from ostinato.models.transformer import Transformer

from ..scheduling.request import IntArray, Request
from ..scheduling.scheduled_step import ScheduledStep

_FIRST = (3, 17, 0, 16, 1, 15, 33, 40, 2, 130, 32, 65)
"""Lengths of the first requests, 0: the longest. The first ones serve the small graphs, so a short context,
where a single key counts for much, comes first, and page boundaries come next."""
_LONGEST_AT = _FIRST.index(0)
_SHARING = 8
"""One request in this many begins like the longest."""
_SHARED_PAGES = 2


@dataclass(frozen=True, eq=False)
class MadeRequest:
    """A history of tokens, and where its keys and values lie."""

    tokens: IntArray
    """int64 [L]."""
    places: IntArray
    """Its pages, by their place among the borrowed ones."""
    first_own: int
    """Positions before this one lie on pages of another request: steps do not compute them."""
    begin: int
    """Where its tokens begin among those of all requests."""

    @property
    def length(self) -> int:
        """L."""
        return len(self.tokens)

    def slots(self, first: int, last: int) -> IntArray:
        """int64: the slots of positions [first, last)."""
        positions = np.arange(first, last)
        slots: IntArray = self.places[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        return slots

    @property
    def room(self) -> int:
        """Positions on its pages."""
        return len(self.places) * PAGE_SIZE


@dataclass(frozen=True)
class Room:
    """What made requests must fit into."""

    num_requests: int
    """How many to make."""
    num_pages: int
    """How many pages they may take together."""
    longest: int
    """Tokens of the longest one."""
    tokens: int
    """Their total length to aim for, if there are enough pages."""


def make_requests(room: Room, vocab_size: int, generator: np.random.Generator) -> list[MadeRequest]:
    """As many requests as asked for, each with at least one page."""
    lengths = _lengths(room, generator)
    requests: list[MadeRequest] = []
    begin = used = 0
    for at, length in enumerate(lengths):
        tokens = generator.integers(0, vocab_size, length)
        shared = _shared_pages(at, length, lengths[_LONGEST_AT] if len(lengths) > _LONGEST_AT else 0)
        places = np.arange(used, used + _pages(length) - shared)
        if shared:
            other = requests[_LONGEST_AT]
            tokens[: shared * PAGE_SIZE] = other.tokens[: shared * PAGE_SIZE]
            places = np.concatenate([other.places[:shared], places])
        requests.append(MadeRequest(tokens, places, shared * PAGE_SIZE, begin))
        begin, used = begin + length, used + _pages(length) - shared
    # Others read the longest request's own first pages: they are not computed again either.
    if any(request.first_own for request in requests):
        longest = requests[_LONGEST_AT]
        shared = max(request.first_own for request in requests)
        requests[_LONGEST_AT] = MadeRequest(longest.tokens, longest.places, shared, longest.begin)
    assert used <= room.num_pages
    return requests


def num_pages_of(requests: Sequence[MadeRequest]) -> int:
    """Pages that they take together."""
    return 1 + max(int(request.places.max()) for request in requests)


def _shared_pages(at: int, length: int, longest: int) -> int:
    """Pages that a request shares with the longest one."""
    if at <= _LONGEST_AT or at % _SHARING != _SHARING - 1:
        return 0
    shared = min(_SHARED_PAGES, (length - 1) // PAGE_SIZE)
    return shared if longest > shared * PAGE_SIZE else 0


def _lengths(room: Room, generator: np.random.Generator) -> list[int]:
    """The length of each request: as wanted, as far as the pages suffice."""
    left = room.num_pages - room.num_requests
    lengths = []
    for at in range(room.num_requests):
        wanted = _FIRST[at] if at < len(_FIRST) else int(generator.integers(1, 50))
        wanted = min(wanted or room.longest, room.longest)
        if at == _LONGEST_AT:  # leave some for the others
            wanted = min(wanted, max(1, 1 + left // 2) * PAGE_SIZE)
        length = min(wanted, (1 + left) * PAGE_SIZE)
        lengths.append(length)
        left -= _pages(length) - 1
    # The last ones grow, in turn, until there are enough tokens to fill the largest step.
    for at in reversed(range(_LONGEST_AT + 1, room.num_requests)):
        missing = room.tokens - sum(lengths)
        if missing <= 0 or left <= 0:
            break
        grown = min(room.longest, lengths[at] + missing, (_pages(lengths[at]) + left) * PAGE_SIZE)
        left -= _pages(grown) - _pages(lengths[at])
        lengths[at] = grown
    return lengths


def _pages(length: int) -> int:
    return -(-length // PAGE_SIZE)


_SIZE = 0.1
"""Scale of what they add, relative to products of order one."""


class MadeAdapters:
    """Every third request has none, the others one of two; requests that share pages share the adapter."""

    def __init__(
        self,
        model: Transformer,
        stacks: AdapterStacks,
        max_rank: int,
        requests: Sequence[MadeRequest],
        seed: int,
    ) -> None:
        self._stacks = stacks
        used = sorted({0, stacks.num_slots - 1})
        generator = torch.Generator().manual_seed(seed)
        self._adapters = {
            slot: _random(model, max(1, max_rank - at), generator) for at, slot in enumerate(used)
        }
        cycle = (NO_ADAPTER, *used)
        self._slots = {
            id(request): cycle[1 if request.first_own else at % len(cycle)]
            for at, request in enumerate(requests)
        }

    def slot_of(self, request: MadeRequest) -> int:
        """The slot of a request's adapter, or NO_ADAPTER."""
        return self._slots[id(request)]

    def added(self, layer: str, x: Tensor, slots: Tensor) -> Tensor:
        """What they add to the product of a linear layer with x [T, in], float32 [T, out]; `slots` [T]."""
        found: Tensor | None = None
        for slot, adapter in self._adapters.items():
            ends = [_product(part, x) for part in adapter.layers[layer] if part is not None]
            own = torch.cat(ends, dim=1) * (slots == slot).unsqueeze(1)
            found = own if found is None else found + own
        assert found is not None
        return found

    @contextmanager
    def written(self) -> Iterator[None]:
        """Inside, the slots hold them."""
        kept: Mapping[str, Tensor] = self._stacks.named_tensors()
        slots = list(self._adapters)
        before = {name: tensor[slots].clone() for name, tensor in kept.items()}
        try:
            for slot, adapter in self._adapters.items():
                self._stacks.write(slot, adapter)
            yield
        finally:
            for name, tensor in kept.items():
                tensor[slots] = before[name]


def _product(part: LowRank, x: Tensor) -> Tensor:
    a, b = part.a.to(x.device).float(), part.b.to(x.device).float()
    return (x @ a.T) @ b.T


def _random(model: Transformer, rank: int, generator: torch.Generator) -> Adapter:
    layers = {}
    for name, linear in adaptable(model).items():
        weight, dtype = linear.weight, linear.weight.dtype
        parts = []
        for rows in linear.parts or (weight.size(0),):
            a = (
                torch.randn(rank, weight.size(1), generator=generator, dtype=torch.float32)
                * weight.size(1) ** -0.5
            )
            b = torch.randn(rows, rank, generator=generator, dtype=torch.float32) * _SIZE
            parts.append(LowRank(a.to(dtype), b.to(dtype)))
        layers[name] = tuple(parts)
    return Adapter(layers, rank, b"")


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
