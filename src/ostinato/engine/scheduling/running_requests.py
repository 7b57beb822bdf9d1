"""The requests with a row, by what their next step does: a part of a prompt, decoding, or their last
token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ostinato.cache.pages import PageAllocator

from .decode_batch import DecodeBatch
from .request import IntArray, Request, RequestRows, RequestStatus
from .request_pages import RequestPages, longest_request
from .scheduled_step import ScheduledStep
from .scheduler_config import SchedulerConfig
from .waiting_requests import WaitingRequests

_NO_ROWS = np.array([], dtype=np.int32)


class RunningRequests:
    """The running requests of one scheduler. Only the youngest may have a partly computed prompt."""

    def __init__(self, config: SchedulerConfig, pages: PageAllocator, waiting: WaitingRequests) -> None:
        self.max_len = longest_request(config, pages)
        """The most tokens a request can have."""
        self.rows = RequestRows(config.max_running, self.max_len, pages.page_size, config.max_drafts)
        self.taken = RequestPages(pages, self.rows, config)
        """Their pages."""
        self.requests: list[Request] = []
        """Oldest first."""
        self.prefilling: Request | None = None
        """The youngest, if its prompt is partly computed."""
        self.decoding: list[Request] = []
        """Those whose prompts are computed, oldest first."""
        self.batch: DecodeBatch | None = None
        """The same, as a step takes them; None: must be rebuilt."""
        self.num_of: Counter[str] = Counter()
        """Running requests by tenant; those without any are not in it."""
        self.joined: list[Request] = []
        """Those that got a row since the last step."""
        self._config, self._pages, self._waiting = config, pages, waiting

    # -- coming and going --------------------------------------------------------------------------

    def move_in(self, request: Request, prefix: IntArray, count: int) -> None:
        """Give a request a row, a cached prefix, and pages for `count` tokens after it."""
        if request.num_preemptions == 0:
            request.num_cached_tokens = len(prefix) * self._pages.page_size
        self.rows.move_in(request, self._end_length(request), self._waiting.line.move_in(request))
        self.taken.start(request, prefix, count)
        request.status = RequestStatus.RUNNING
        self.requests.append(request)
        self.num_of[request.tenant] += 1
        self._waiting.shares_are_settled = False
        self.joined.append(request)

    def move_out(self, request: Request) -> None:
        """Take row and pages from it."""
        self.requests.remove(request)
        self.num_of[request.tenant] -= 1
        if not self.num_of[request.tenant]:
            del self.num_of[request.tenant]
        if self.prefilling is request:
            self.prefilling = None
        if request in self.decoding:
            self.decoding.remove(request)
            self.batch = None
        self.taken.leave(request)
        self._waiting.line.move_out(int(self.rows.adapter_slots[request.row]))
        self.rows.move_out(request)
        self._waiting.head_is_blocked = self._waiting.shares_are_settled = False

    def give_back_pages(self) -> None:
        """Give back pages that no future token can see."""
        if self.taken.give_back(self.requests):
            self._waiting.head_is_blocked = False

    def commit_full_of(self, row: int, computed: int) -> None:
        """Offer pages of this row that have become full as prefixes."""
        if self.taken.commit_full_of(row, computed):
            self._waiting.head_is_blocked = False

    def commit_full(self, rows: IntArray, computed: IntArray) -> None:
        """The same for several rows."""
        if self.taken.commit_full(rows, computed):
            self._waiting.head_is_blocked = False

    def _end_length(self, request: Request) -> int:
        if request.params is None or request.params.max_tokens is None:
            return self.max_len
        return min(self.max_len, request.num_prompt_tokens + request.params.max_tokens)

    # -- a step ------------------------------------------------------------------------------------

    def ready_decodes(self) -> tuple[tuple[Request, ...], IntArray]:
        """Requests that decode in the next step: all but those whose last token is pending."""
        if not self.decoding:
            return (), _NO_ROWS
        if self.batch is None:
            self.batch = DecodeBatch(self.decoding, self.rows)
        requests, rows = self.batch.requests, self.batch.rows
        ready = self.rows.num_promised[rows] < self.rows.max_tokens[rows]
        if ready.all():
            return requests, rows
        return tuple(requests[at] for at in np.flatnonzero(ready).tolist()), rows[ready]

    def has_streams(self, num_in_flight: int) -> bool:
        """Whether any decoding request needs more tokens than are certainly under way."""
        if self.batch is None:
            return False
        rows = self.batch.rows
        known = self.rows.num_tokens[rows] + num_in_flight
        return bool((known < self.rows.max_tokens[rows]).any())

    def shared_prefix(self) -> int:
        """The decode batch's common prefix; looked up again if the batch or one of its pages has changed."""
        batch = self.batch
        if batch is None:
            return 0
        if self._config.shared_prefixes and batch.num_twins != self.taken.num_twins:
            batch.shared_prefix = self.taken.shared_prefix(batch.requests)
            batch.num_twins = self.taken.num_twins
        return batch.shared_prefix

    def advance(self, step: ScheduledStep, chunks: Sequence[tuple[Request, int]]) -> None:
        """Account for a step that is about to be launched."""
        for request, count in chunks:
            self.prefilling = request if count < request.num_unscheduled else None
            if self.prefilling is None and not request.is_embedding:
                self.decoding.append(request)
                self.batch = None
        if step.num_requests == 1:
            row = step.rows.item()
            self.rows.num_scheduled[row] += step.num_new_tokens.item()
            self.rows.num_promised[row] += step.samples.item() * step.query_len
        else:
            self.rows.num_scheduled[step.rows] = step.seq_lens
            self.rows.num_promised[step.rows] += step.samples * step.query_len
        self.joined.clear()

    def look_ahead(self, step: ScheduledStep) -> None:
        """Compute how many steps like this one follow it."""
        if self.batch is not None and step.requests is self.batch.requests:
            self.batch.look_ahead(step.num_drafts)
        elif self.batch is not None:
            self.batch.steady_steps = 0

    # -- the books ---------------------------------------------------------------------------------

    def drop_finished(self) -> None:
        """Rebuild the books, whatever state they are in, for requests that have not ended."""
        self.requests = [request for request in self.requests if not request.is_finished]
        self.num_of = Counter(request.tenant for request in self.requests)
        self.rows.restore(self.requests)
        self._waiting.line.restore(self.rows.adapter_slots.tolist())
        self.decoding = [request for request in self.decoding if not request.is_finished]
        if self.prefilling is not None and self.prefilling.is_finished:
            self.prefilling = None
        self.batch = None
        self.joined.clear()
        self.taken.restore(self.requests)

    def check_integrity(self) -> None:
        """Assert that pages and rows are consistent."""
        owned = [[page for page in request.pages if page] for request in self.requests]
        self._pages.check_integrity(owned, chains_are_whole=self._config.window is None)
        assert self.num_of == Counter(request.tenant for request in self.requests)
        tenants = [request for request in self.rows.requests if request is not None]
        assert sorted(tenants, key=id) == sorted(self.requests, key=id), "a row is lost or taken twice"
        assert self.rows.num_free + len(self.requests) == self._config.max_running
        assert all(self.rows.requests[request.row] is request for request in self.requests)
        self._waiting.line.check_integrity(self.rows.adapter_slots.tolist())
        decoding = [request.order for request in self.decoding]
        assert decoding == sorted(decoding), "decoding requests are in order"
        assert self.prefilling is None or self.prefilling is self.requests[-1], "the youngest prefills"
        for request in self.requests:
            assert request.num_scheduled <= len(request.pages) * self._pages.page_size
            assert self.rows.capacity[request.row] == len(request.pages) * self._pages.page_size
            assert request.num_computed <= request.num_scheduled <= request.num_promised
            assert request.num_tokens <= request.num_promised
