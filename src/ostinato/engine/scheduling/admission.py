"""Prompts: which requests may enter, which gets a row next, and how much of each prompt a step computes."""

from __future__ import annotations

from ostinato.cache.pages import PageAllocator

from .prompt_room import PromptBound, PromptRoom
from .request import IntArray, Request, RequestError
from .running_requests import RunningRequests
from .scheduler_config import SchedulerConfig
from .waiting_requests import WaitingRequests


class Admission:
    """Admission of one scheduler; see Note [Fair order] in scheduler.py."""

    def __init__(
        self,
        config: SchedulerConfig,
        pages: PageAllocator,
        running: RunningRequests,
        waiting: WaitingRequests,
        bound: PromptBound | None,
    ) -> None:
        self._config, self._pages, self._bound = config, pages, bound
        self._running, self._waiting = running, waiting

    def check_fits(self, request: Request) -> None:
        """Raises RequestError if it could never run."""
        # A completion needs room for at least one token after the prompt.
        needed, max_len = request.num_prompt_tokens + (not request.is_embedding), self._running.max_len
        if needed <= max_len:
            return
        by_pages = max_len < self._config.max_model_len
        limit = (
            f"the KV cache holds {max_len} tokens in all: give it more memory"
            if by_pages
            else f"the model length is {max_len}: raise max_model_len, if the model allows it,"
        )
        raise RequestError(
            f"request {request.request_id}: a prompt of {request.num_prompt_tokens} tokens"
            f"{'' if request.is_embedding else ' and at least one more'} cannot fit, {limit}"
            " or shorten the prompt"
        )

    @property
    def may_prompt(self) -> bool:
        """Whether the next step may compute a part of a prompt."""
        if self._running.prefilling is not None:
            return True
        if not self._running.rows.num_free or self._waiting.head_is_blocked:
            return False
        return bool(self._waiting.turn) or self._waiting.line.is_due(None)

    def room(self, rows: IntArray, num_in_flight: int) -> PromptRoom:
        """The room for prompts in a step, next to the decoding requests in these rows."""
        left = self._config.max_batched_tokens - len(rows)
        if self._bound is None or not self.may_prompt:
            return PromptRoom(left)
        if not len(rows) and not self._running.has_streams(num_in_flight):
            return PromptRoom(left)
        return self._bound.room(len(rows), int(self._running.rows.num_scheduled[rows].sum()), left)

    def chunks(self, room: PromptRoom) -> list[tuple[Request, int]]:
        """The prompts of the next step and how many tokens of each, with pages for them."""
        return self._continue_prefill(room) + self._admit(room)

    def _continue_prefill(self, room: PromptRoom) -> list[tuple[Request, int]]:
        request, taken = self._running.prefilling, self._running.taken
        if request is None:
            return []
        count = min(request.num_unscheduled, room.at(request.num_scheduled))
        needed = taken.missing(request, request.num_scheduled + count)
        if needed > self._pages.num_free:
            # The youngest waits, keeping what it has, until older ones leave or take its pages.
            return []
        taken.take(request, needed)
        room.take(request.num_scheduled, count)
        return [(request, count)]

    def _admit(self, room: PromptRoom) -> list[tuple[Request, int]]:
        running, waiting, line = self._running, self._waiting, self._waiting.line
        chunks: list[tuple[Request, int]] = []
        while room.tokens and running.rows.num_free and not waiting.head_is_blocked:
            if line.is_due(waiting.turn.first):
                waiting.queue_first(line.recall())
            if (request := waiting.turn.first) is None:
                break
            if not line.admits(request):
                line.set_aside(waiting.turn.popleft())
                continue
            prefix = running.taken.cached_prefix(request)
            start = len(prefix) * self._pages.page_size
            remaining, most = request.num_tokens - start, room.at(start)
            if not most or (remaining > most and not self._config.chunked_prefill):
                break
            if self._lacking(request, prefix) > 0:
                waiting.head_is_blocked = True
                break
            count = min(remaining, most)
            assert waiting.turn.popleft() is request
            running.move_in(request, prefix, count)
            chunks.append((request, count))
            room.take(start, count)
        return chunks

    def lacking_pages(self, request: Request) -> int:
        """How many more free pages a newcomer needs; 0 or less: it can be admitted."""
        return self._lacking(request, self._running.taken.cached_prefix(request))

    def _lacking(self, request: Request, prefix: IntArray) -> int:
        """It must fit after what a running prefill still needs and a page for every decode.

        Admitting a request that is preempted soon after would compute its prompt twice.
        """
        running, taken = self._running, self._running.taken
        if not running.requests:
            return 0
        behind = taken.missing_at_once(request, request.num_tokens - len(prefix) * self._pages.page_size)
        needed = behind + self._pages.num_unowned(prefix)
        promised = 0
        if running.prefilling is not None:
            promised = taken.missing_at_once(running.prefilling, running.prefilling.num_tokens)
        return needed + promised + len(running.decoding) - self._pages.num_free
