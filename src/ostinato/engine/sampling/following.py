"""Requests whose texts follow grammars: the link between the scheduler, which runs them, and the processes
that know which tokens may come next.

Nothing here waits for longer than `Patience` allows. A request whose grammar has not answered by then is
parked: it leaves the batch, as if preempted, and returns with the answer. The same goes for a request whose
grammar is not compiled yet, or whose grammar's process has died and must be restarted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ostinato.grammars.followed_text import FollowedText, Standing
from ostinato.grammars.host import GrammarHost
from ostinato.grammars.limits import GrammarLimits
from ostinato.grammars.nursery import pack_vocabulary
from ostinato.text.errors import GrammarError
from ostinato.text.tokenizer import Tokenizer

from ..parameters.sampling_params import RequestError, SamplingParams
from ..scheduling.request import FinishReason, Request
from ..scheduling.scheduler import Scheduler

IDLE_SECONDS = 0.005
"""How long a step with nothing else to do waits for grammars."""


class Following:
    """All requests of an engine that follow a grammar."""

    def __init__(
        self, scheduler: Scheduler, tokenizer: Tokenizer | None, vocab_size: int, limits: GrammarLimits
    ) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._host = GrammarHost(self._pack_vocabulary, vocab_size, limits)
        self._requests: dict[FollowedText, Request] = {}

    def _pack_vocabulary(self) -> int:
        tokenizer, vocab_size = self._tokenizer, self._vocab_size
        assert tokenizer is not None
        special = tokenizer.special_ids
        # A special token is not text: without bytes, no grammar can allow it except as the end.
        known = [
            b"" if token in special else tokenizer.bytes_per_token[token]
            for token in range(min(tokenizer.vocab_size, vocab_size))
        ]
        return pack_vocabulary(
            known, vocab_size, [end for end in tokenizer.eos_token_ids if end < vocab_size]
        )

    def warm_up(self) -> None:
        """Start what the first grammar would have to wait for."""
        if self._tokenizer is not None:
            self._host.warm_up()

    def close(self) -> None:
        """End all processes; no text is followed any more."""
        self.let_go()
        self._host.close()

    # -- requests in and out -----------------------------------------------------------------------

    def text(self, params: SamplingParams, tenant: str = "") -> FollowedText | None:
        """The text that such a request must follow. Raises RequestError if that is not possible."""
        if params.structured_outputs is None:
            return None
        if self._tokenizer is None:
            raise RequestError("structured outputs need text, and this model has no tokenizer")
        try:
            return self._host.text(params.structured_outputs, tenant)
        except GrammarError as error:
            raise RequestError(str(error)) from error

    def add(self, request: Request) -> None:
        """Queue a request with a grammar, to run once that is compiled."""
        text = request.grammar
        assert text is not None
        self._scheduler.add(request, parked=True)
        self._requests[text] = request
        text.is_parked = True
        text.begin()
        if text.standing is Standing.READY:
            self._release(request, text)

    def let_go(self) -> None:
        """Release the grammars of requests that have ended."""
        left = self._scheduler.left_grammars
        while left:
            text = left.pop()
            self._requests.pop(text, None)
            text.close()

    def attend(self) -> tuple[Request, ...]:
        """Release parked requests whose grammars are ready; returns the requests that this ends."""
        scheduler = self._scheduler
        is_idle = not (scheduler.running or scheduler.waiting or scheduler.num_steps_in_flight)
        ended: list[Request] = []
        for text in self._host.attend(IDLE_SECONDS if is_idle else 0.0):
            request = self._requests.get(text)
            if request is None or not text.is_parked:
                continue
            if text.standing in (Standing.READY, Standing.FOLLOWS):
                self._release(request, text)
            else:
                ended += self._judge(request, text)
        return tuple(ended)

    def _release(self, request: Request, text: FollowedText) -> None:
        text.is_parked = False
        self._scheduler.release(request)

    # -- in a step ---------------------------------------------------------------------------------

    def join(self, requests: Iterable[Request]) -> None:
        """Begin the texts of requests that got a row, or resume them."""
        followed = [request for request in requests if request.grammar is not None]
        if not followed:
            return
        for request in followed:
            assert request.grammar is not None
            request.grammar.catch_up(request.output_ids)
        self._host.send(request.grammar for request in followed if request.grammar is not None)

    def follow(self, requests: Sequence[Request], tokens: Sequence[int]) -> tuple[Request, ...]:
        """Advance the texts by these tokens; returns the requests that this ends. A request without an answer
        in time leaves the batch."""
        texts = []
        for request, token in zip(requests, tokens, strict=True):
            assert request.grammar is not None
            if not request.is_finished:
                request.grammar.accept(token)
                texts.append(request.grammar)
        self._host.settle(texts)
        return tuple([ended for text in texts for ended in self._judge(self._requests[text], text)])

    def prepare(self, requests: Sequence[Request]) -> tuple[Request, ...]:
        """Make sure that the allowed next tokens are known for these requests, or that they leave the batch;
        returns the requests that this ends."""
        texts = []
        for request in requests:
            text = request.grammar
            assert text is not None
            # An interrupt may have come between a token and its grammar.
            if text.standing is Standing.READY or text.num_tokens != request.num_output_tokens:
                text.catch_up(request.output_ids)
            texts.append(text)
        self._host.settle(texts)
        return tuple([ended for text in texts for ended in self._judge(self._requests[text], text)])

    def _judge(self, request: Request, text: FollowedText) -> list[Request]:
        """Act on where a text stands; returns its request if that ended."""
        match text.standing:
            case Standing.FOLLOWS:
                return []
            case Standing.COMPLETE:
                self._scheduler.finish(request, FinishReason.STOP)
            case Standing.REFUSED:
                # min_tokens or a bias left no allowed token.
                error = (
                    f"token {request.output_ids[-1]} is not allowed by the structured output: the other "
                    "sampling parameters leave no token that is allowed"
                )
                self._fail(request, error, is_at_fault=True)
            case Standing.DEAD_END:
                self._fail(request, "the structured output is a dead end: it allows no token here", True)
            case Standing.FAILED:
                self._fail(request, text.error or "", text.is_at_fault)
            case Standing.ASKED | Standing.COMPILING | Standing.READY:
                if not text.is_parked:
                    text.is_parked = True
                    self._scheduler.park(request)
                    self._host.note(text)
                return []
        return [request]

    def _fail(self, request: Request, error: str, is_at_fault: bool) -> None:
        self._scheduler.finish(request, FinishReason.ERROR, error=error, is_at_fault=is_at_fault)
