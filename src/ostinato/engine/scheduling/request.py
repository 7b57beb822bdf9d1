"""A request, and the numbers of all running requests as arrays.

Note [Lengths of a request]
While one step runs and the next is scheduled ahead, a request that decodes looks like this:

    position   0                                   computed   scheduled     length
               |--------------------------------------|-----------|-----------|
    KV         | computed                             | in flight | none yet  |
               |--------------------------------------|--+--------|-----------|
    token id   | known to the host (prompt, output)      | pending: only the   |
               |                                         | device knows it     |
               |-----------------------------------------|---------------------|
               0                                   num_tokens     num_promised

- num_computed: tokens whose KV is known to be in the pages (their step is complete)
- num_scheduled: these and the tokens in flight; where the next step of the request begins
- num_tokens: tokens whose id the host knows
- num_promised: these and the pending ones, which steps in flight will sample
- num_unscheduled = num_promised - num_scheduled: what the next step may take; 1 while decoding

A decode step is scheduled while its input token is pending: the device has the id in the request's row.

A step that verifies k drafts produces 1 to k + 1 tokens. Until it is complete, num_scheduled and num_promised
count as if all of them were accepted; then the excess is taken back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

import numpy as np

from ostinato.grammars.followed_text import FollowedText
from ostinato.text.grammar import Mask

from ..adapters.slots import NO_SLOT, AdapterVersion
from ..parameters.sampling_params import RequestError, SamplingParams
from ..token_ids import IntArray, is_token_array, token_array
from .request_drafts import RequestDrafts
from .token_rules import TokenRules

__all__ = ["FinishReason", "IntArray", "Request", "RequestError", "RequestRows", "RequestStatus"]

RESERVED_ROW = 0
"""Padding uses this row; no request ever has it. A request in row 0 is not running."""

_NEVER = np.iinfo(np.int32).max


class RequestStatus(Enum):
    """Where a request is."""

    WAITING = "waiting"
    """Not admitted yet, or preempted; owns no page and no row."""
    RUNNING = "running"
    """Owns a row and pages."""
    FINISHED = "finished"
    """Has a finish reason; owns nothing."""


class FinishReason(StrEnum):
    """Why a request ended; the values are those of the OpenAI API."""

    STOP = "stop"
    """A stop string, a stop token or the end-of-sequence token; for an embedding: done."""
    LENGTH = "length"
    """max_tokens or the model length was reached."""
    ABORT = "abort"
    """The caller no longer wants it."""
    ERROR = "error"
    """It failed; see `Request.error`."""


@dataclass(eq=False)
class Request:
    """One completion (or embedding) to compute. Only the scheduler changes it."""

    request_id: str
    """The caller's name for it, unique among unfinished requests."""
    prompt_ids: IntArray
    """int32: token ids of the prompt, at least one; may be given as any sequence of integers."""
    params: SamplingParams | None = None
    """How to sample; None for an embedding, which ends when its prompt is computed."""
    eos_token_ids: frozenset[int] = frozenset()
    """The model's end-of-sequence tokens."""
    grammar: FollowedText | None = None
    """Which tokens may come next, for structured output."""
    cache_salt: str | None = None
    """Only requests with the same salt find each other's prefixes in the cache."""
    adapter: AdapterVersion | None = None
    """The adapter added to the model's weights for it."""
    tenant: str = ""
    """Whose request it is: tenants share request slots and pages (`fair_shares.py`)."""
    weight: float = 1.0
    """The share of its tenant, relative to those of others."""
    arrival_time: float = field(default_factory=time.monotonic)
    """When it arrived, for latencies; the order of service is the order of `Scheduler.add`."""

    rules: TokenRules | None = field(default=None, init=False)
    """Which tokens its parameters' lists allow; set by the engine."""
    processors: Sequence[Callable[..., Any]] = field(default=(), init=False)
    """Callers' functions that change its logits; set by the engine."""
    is_processed: bool = field(default=False, init=False)
    """Whether there are such, or ones that change the logits of all requests."""
    highest_id: int | None = field(default=None, init=False)
    """The highest id of its prompt, if its maker has determined it."""
    order: int = field(default=-1, init=False)
    """Its number in the order of arrival, set by the scheduler."""
    is_late: bool = field(default=False, init=False)
    """Whether it arrived during a drain (`Scheduler.drain`)."""
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    """Where it is."""
    row: int = field(default=RESERVED_ROW, init=False)
    """Its row while it runs, else 0."""
    num_cached_tokens: int = field(default=0, init=False)
    """Prompt tokens found in the prefix cache when it was first admitted."""
    num_preemptions: int = field(default=0, init=False)
    """How often it lost its pages and had to be computed again."""
    drafts: RequestDrafts | None = field(default=None, init=False)
    """Counts of its drafts; None before any were verified."""
    finish_reason: FinishReason | None = field(default=None, init=False)
    """Why it ended; None before."""
    stop_reason: int | str | None = field(default=None, init=False)
    """The stop token id or stop string that ended it; None for end-of-sequence and other reasons."""
    error: str | None = field(default=None, init=False)
    """What went wrong, with finish reason `error`."""
    is_at_fault: bool = field(default=False, init=False)
    """Whether it failed because of its own parameters."""

    _settled_output: list[int] = field(default_factory=list, init=False, repr=False)
    _rows: RequestRows | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not is_token_array(self.prompt_ids):
            self.prompt_ids = token_array(self.prompt_ids)
        if not len(self.prompt_ids):
            raise RequestError(
                f"request {self.request_id}: the prompt is empty, at least one token is needed"
            )
        if self.prompt_ids.dtype != np.int32 and self.prompt_ids.min() < 0:
            raise RequestError(f"request {self.request_id}: token id {self.prompt_ids.min()} is negative")

    @property
    def is_embedding(self) -> bool:
        """Whether the prompt is computed for its hidden states only."""
        return self.params is None

    @property
    def waits_for_tokens(self) -> bool:
        """Whether a token can only be chosen once the one before it is known."""
        return self.grammar is not None or (self.rules is not None and self.rules.follows_tokens)

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED

    @property
    def output_ids(self) -> list[int]:
        """The tokens generated so far, as far as the host knows them. A copy: O(length)."""
        if self._rows is None:
            return list(self._settled_output)
        tokens: list[int] = self._rows.token_ids[self.row, self.num_prompt_tokens : self.num_tokens].tolist()
        return tokens

    @property
    def allowed_by_rules(self) -> Mask | None:
        """The tokens that its rules allow after those that the host knows; None without rules."""
        if self.rules is None:
            return None
        return self.rules.next(self.last_output(self.rules.num_looked_at), self.num_output_tokens)

    def first_tokens(self, count: int) -> IntArray:
        """Its first `count` tokens, prompt and output, while it runs."""
        assert self._rows is not None
        tokens: IntArray = self._rows.token_ids[self.row, :count]
        return tokens

    def last_output(self, count: int) -> list[int]:
        """At most `count` of the tokens generated last, as far as the host knows them."""
        if self._rows is None:
            return self._settled_output[-count:]
        end = self.num_tokens
        tokens: list[int] = self._rows.token_ids[
            self.row, max(self.num_prompt_tokens, end - count) : end
        ].tolist()
        return tokens

    @property
    def pages(self) -> list[int]:
        """Its pages in the order of positions, while it runs; 0 for one that it has given back. A copy."""
        return [] if self._rows is None else self._rows.pages_of(self.row)

    @property
    def adapter_slot(self) -> int:
        """Its adapter's slot on the device, while it runs."""
        return NO_SLOT if self._rows is None else int(self._rows.adapter_slots[self.row])

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens the host knows: prompt and output."""
        if self._rows is None:
            return len(self.prompt_ids) + len(self._settled_output)
        return int(self._rows.num_tokens[self.row])

    @property
    def num_output_tokens(self) -> int:
        """Output tokens the host knows."""
        return self.num_tokens - len(self.prompt_ids)

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is in its pages."""
        return 0 if self._rows is None else int(self._rows.num_computed[self.row])

    @property
    def num_scheduled(self) -> int:
        """Tokens computed or in flight: the position where its next step begins."""
        return 0 if self._rows is None else int(self._rows.num_scheduled[self.row])

    @property
    def num_promised(self) -> int:
        """Tokens the host knows or that steps in flight will sample."""
        return self.num_tokens if self._rows is None else int(self._rows.num_promised[self.row])

    @property
    def num_in_flight(self) -> int:
        """Tokens in steps that are not complete."""
        return self.num_scheduled - self.num_computed

    @property
    def num_pending(self) -> int:
        """Tokens that steps in flight will sample."""
        return self.num_promised - self.num_tokens

    @property
    def num_unscheduled(self) -> int:
        """Tokens that its next step may take, including a pending one."""
        return self.num_promised - self.num_scheduled


class RequestRows:
    """The numbers of the running requests, one row each: a step advances all of them at once.

    Rows are reused as soon as they are free, while steps in flight still carry results of the earlier tenant.
    `tenancy` distinguishes them: it changes whenever a row changes hands.
    """

    def __init__(self, max_running: int, max_len: int, page_size: int, max_drafts: int = 0) -> None:
        """Rows 1..max_running for requests of at most `max_len` tokens, prompt and output together, with
        pages for `max_drafts` more."""
        rows = max_running + 1
        self._page_size = page_size
        self._free = list(range(max_running, 0, -1))
        self.requests: list[Request | None] = [None] * rows
        """The tenant of each row."""
        # Virtual until touched: a row costs what its longest tenant used.
        self.token_ids = np.zeros((rows, max_len), dtype=np.int32)
        """Known token ids by position."""
        self.pages = np.zeros((rows, -(-(max_len + max_drafts) // page_size)), dtype=np.intp)
        """Pages in the order of positions, as many as `capacity` says; 0 for one that was given back."""
        self.num_tokens = np.zeros(rows, dtype=np.int32)
        """See Note [Lengths of a request], also for the next three."""
        self.num_promised = np.zeros(rows, dtype=np.int32)
        self.num_computed = np.zeros(rows, dtype=np.int32)
        self.num_scheduled = np.zeros(rows, dtype=np.int32)
        self.capacity = np.zeros(rows, dtype=np.int32)
        """Tokens that its pages can hold."""
        self.num_committed_pages = np.zeros(rows, dtype=np.int32)
        """Pages that are in the prefix cache."""
        self.num_given_back = np.zeros(rows, dtype=np.int32)
        """How many of its first pages it no longer has."""
        self.max_tokens = np.zeros(rows, dtype=np.int32)
        """Length, prompt included, at which it ends."""
        self.stops_from = np.zeros(rows, dtype=np.int32)
        """Length, prompt included, from which the next token may be a stop token."""
        self.stop_ids = np.full((1, rows), -1, dtype=np.int32)
        """Tokens that end it, one per line, padded with -1; as many lines as the largest set so far."""
        self.waits = np.zeros(rows, dtype=bool)
        """Whether each token can only be chosen once the previous one is known: it follows a grammar, or bad
        words."""
        self.num_waiting = 0
        """How many rows do."""
        self.adapter_slots = np.full(rows, NO_SLOT, dtype=np.int32)
        """Its adapter's slot on the device."""
        self.num_adapted = 0
        """How many have one."""
        self.tenancy = np.zeros(rows, dtype=np.int64)
        """Changes whenever the row changes hands."""

    @property
    def num_free(self) -> int:
        """Rows without a tenant."""
        return len(self._free)

    def move_in(self, request: Request, max_tokens: int, adapter_slot: int = NO_SLOT) -> None:
        """Give a row to a request of which nothing is computed yet; it ends at a length of `max_tokens`."""
        row, prompt, output = self._free.pop(), request.prompt_ids, request._settled_output
        length = len(prompt) + len(output)
        self.requests[row] = request
        self.tenancy[row] += 1
        self.token_ids[row, : len(prompt)] = prompt
        if output:
            self.token_ids[row, len(prompt) : length] = output
        self.num_tokens[row] = self.num_promised[row] = length
        self.num_computed[row] = self.num_scheduled[row] = 0
        self.capacity[row] = self.num_committed_pages[row] = self.num_given_back[row] = 0
        self.max_tokens[row] = max_tokens
        self.waits[row] = request.waits_for_tokens
        self.num_waiting += request.waits_for_tokens
        self.adapter_slots[row] = adapter_slot
        self.num_adapted += adapter_slot != NO_SLOT
        self._set_stops(row, request)
        request.row, request._rows = row, self

    def move_out(self, request: Request) -> None:
        """Take the row back. Results that steps in flight still compute for it are dropped."""
        row = request.row
        request._settled_output = request.output_ids
        request.row, request._rows = RESERVED_ROW, None
        self.requests[row] = None
        self.num_waiting -= request.waits_for_tokens
        self.waits[row] = False
        self.num_adapted -= int(self.adapter_slots[row] != NO_SLOT)
        self.adapter_slots[row] = NO_SLOT
        self.tenancy[row] += 1
        self._free.append(row)

    def pages_of(self, row: int) -> list[int]:
        """The pages of the row's tenant."""
        pages: list[int] = self.pages[row, : self.capacity[row] // self._page_size].tolist()
        return pages

    def restore(self, tenants: Sequence[Request]) -> None:
        """Rebuild the books, whatever state they are in: these requests keep their rows, all other rows are
        free, and results that steps in flight still compute for those are dropped."""
        by_row = {request.row: request for request in tenants}
        for row in range(1, len(self.requests)):
            self.requests[row] = by_row.get(row)
            if row not in by_row:
                self.waits[row] = False
                self.adapter_slots[row] = NO_SLOT
                self.tenancy[row] += 1
        self.num_waiting = sum(request.waits_for_tokens for request in tenants)
        self.num_adapted = int(np.count_nonzero(self.adapter_slots != NO_SLOT))
        self._free = [row for row in range(len(self.requests) - 1, 0, -1) if row not in by_row]

    def num_adapters(self, rows: IntArray) -> int:
        """The number of different adapters of the tenants of these rows."""
        if not self.num_adapted:
            return 0
        slots = self.adapter_slots[rows]
        return len(np.unique(slots[slots != NO_SLOT]))

    def never_commit(self, row: int) -> None:
        """Keep the pages of this tenant out of the prefix cache."""
        self.num_committed_pages[row] = _NEVER

    def append(self, rows: IntArray, lengths: IntArray, tokens: IntArray) -> tuple[list[int], list[int]]:
        """Add a token to each of these rows, which have these lengths. Returns the places that end, and those
        of them that end by a stop token."""
        self.token_ids[rows, lengths] = tokens
        grown = lengths + 1
        self.num_tokens[rows] = grown
        over = grown >= self.max_tokens[rows]
        stopped = self.stop_ids[0][rows] == tokens
        for line in self.stop_ids[1:]:
            stopped |= line[rows] == tokens
        if not np.count_nonzero(stopped):
            return (_places(over) if np.count_nonzero(over) else []), []
        stopped &= lengths >= self.stops_from[rows]
        return _places(over | stopped), _places(stopped)

    def append_one(self, row: int, length: int, token: int) -> tuple[bool, bool]:
        """`append` for a single row: whether it ends, and whether by a stop token."""
        self.token_ids[row, length] = token
        self.num_tokens[row] = length + 1
        is_stop = token in self.stop_ids[:, row].tolist() and length >= self.stops_from.item(row)
        return is_stop or length + 1 >= self.max_tokens.item(row), is_stop

    def append_bunch(
        self, rows: IntArray, lengths: IntArray, tokens: IntArray, counts: IntArray
    ) -> list[tuple[IntArray, list[int], list[int]]]:
        """Add the first `counts` [n] of tokens [q, n] to these rows of these lengths, each until its request
        ends. For each token in turn: who gets one, who ends, and who of these by a stop token, as places in
        `rows`."""
        rounds: list[tuple[IntArray, list[int], list[int]]] = []
        left = counts.copy()
        for at, line in enumerate(tokens):
            places = np.flatnonzero(left > at)
            if not len(places):
                break
            over, stopped = self.append(rows[places], lengths[places] + at, line[places])
            ended = places[over].tolist()
            left[ended] = 0
            rounds.append((places, ended, places[stopped].tolist()))
        return rounds

    def _set_stops(self, row: int, request: Request) -> None:
        params = request.params
        self.stop_ids[:, row] = -1
        self.stops_from[row] = 0
        if params is None:
            return
        eos: Sequence[int] = () if params.ignore_eos else tuple(request.eos_token_ids)
        ids = {*eos, *(params.stop_token_ids or ())}
        missing = len(ids) - len(self.stop_ids)
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, missing), (0, 0)), constant_values=-1)
        if ids:
            self.stop_ids[: len(ids), row] = list(ids)
        self.stops_from[row] = request.num_prompt_tokens + params.min_tokens


def _places(mask: IntArray) -> list[int]:
    found: list[int] = mask.nonzero()[0].tolist()
    return found
