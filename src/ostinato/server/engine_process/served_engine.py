"""Requests of the wire on the engine core: commands in, one list of news per step out."""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from ostinato.engine.core import EngineCore
from ostinato.engine.delivery.pooling import pooled
from ostinato.engine.outputs import Logprob
from ostinato.engine.sampling_params import RequestError, SamplingParams
from ostinato.engine.scheduling.request import Request, RequestStatus
from ostinato.engine.stepping.flight import Extras, Progress
from ostinato.engine.token_ids import token_array

from ..wire.messages import Embed, Generate, News, StepNews, TokenLogprobs


class ServedEngine:
    """The engine core with wire ids. Not thread-safe.

    It works on token ids alone: text is the HTTP process's business, so that no step waits for it.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._poolings: dict[int, str] = {}
        """Of the embeddings being computed."""
        core.following.warm_up()
        self._arrived: dict[int, float] = {}
        """When requests came that have had no news yet."""
        self._waiting: deque[Request] = deque()
        """Those not seen running yet, in their order, which is also the order of their first steps."""
        self._parked: set[Request] = set()
        """Those that wait for their grammars before they wait for their turn."""
        self._queued: dict[int, float] = {}
        """How long those waited that have had no news yet."""
        self._begun: set[int] = set()
        """Requests whose first news is out, and with it what is told once."""
        self._batch: tuple[Request, ...] = ()
        self._batch_ids: list[int] = []
        """Of the last step; while the same requests go on, nothing about them has to be worked out."""
        # Requests without a seed get one from here: a run with the same requests repeats itself.
        self._seeds = np.random.default_rng(core.config.config.seed)

    @property
    def is_busy(self) -> bool:
        """Whether a step would do something."""
        return self.core.can_step

    def generate(self, command: Generate) -> News | None:
        """Queue a completion; news only if it is refused."""
        self._arrived[command.id] = time.perf_counter()
        params = command.params
        if params.seed is None and not params.is_greedy:
            params.seed = int(self._seeds.integers(2**62))
        return self._add(command.id, command.prompt_ids, params, command.cache_salt)

    def embed(self, command: Embed) -> News | None:
        """Queue an embedding; news only if it is refused."""
        refused = self._add(command.id, command.prompt_ids, None)
        if refused is None:
            self._poolings[command.id] = command.pooling
        return refused

    def abort(self, ids: list[int]) -> list[News]:
        """End these requests; news of those that were unfinished."""
        ended = [id for id in ids if self.core.abort(str(id))]
        for id in ended:
            self._poolings.pop(id, None)
            self._begun.discard(id)
            self._arrived.pop(id, None)
            self._queued.pop(id, None)
        return [News(id, finish_reason="abort") for id in ended]

    def step(self) -> StepNews:
        """Run one step; what it brought."""
        began = time.perf_counter()
        brought = self.core.step()
        self._note_admitted(began)
        return self._told(brought)

    def settle(self) -> StepNews:
        """Wait for the steps under way; what they brought."""
        return self._told(self.core.settle())

    def _told(self, brought: list[Progress]) -> StepNews:
        told = StepNews([], [], [])
        for progress in brought:
            requests, tokens, ended, extras = progress
            if requests is not self._batch or ended or extras:
                self._sort(progress, told)
            else:
                told.ids.extend(self._batch_ids)
                told.tokens.extend(tokens)
        return told

    def _note_admitted(self, began: float) -> None:
        """See who left the queue in the step that began then."""
        if self._parked:
            released = {request for request in self._parked if request not in self.core.scheduler.parked}
            self._parked -= released
            self._waiting.extend(sorted(released, key=lambda request: request.order))
        while self._waiting and self._waiting[0].status is not RequestStatus.WAITING:
            id = int(self._waiting.popleft().request_id)
            if (arrived := self._arrived.pop(id, None)) is not None:
                self._queued[id] = max(0.0, began - arrived)

    def _sort(self, progress: Progress, told: StepNews) -> None:
        """Tell plain tokens of those that have begun in two lists, and everything else as news."""
        requests, tokens, ended, extras = progress
        ids = [int(request.request_id) for request in requests]
        others = {*ended, *extras}
        for request, id, token in zip(requests, ids, tokens, strict=True):
            if id in self._begun and request not in others:
                told.ids.append(id)
                told.tokens.append(token)
            else:
                told.news.append(self._news(request, token, extras.get(request), request in ended))
        for request in others.difference(requests):
            told.news.append(self._news(request, None, extras.get(request), request in ended))
        self._begun.update(ids)
        self._begun.difference_update(int(request.request_id) for request in ended)
        # Those who have ended are in no batch to come.
        self._batch, self._batch_ids = requests, ids

    def _add(
        self, id: int, prompt_ids: list[int], params: SamplingParams | None, cache_salt: str | None = None
    ) -> News | None:
        try:
            eos = self.core.loaded.eos_token_ids
            grammar = None if params is None else self.core.following.text(params)
            request = Request(str(id), token_array(prompt_ids), params, eos, grammar, cache_salt)
            self.core.add(request)
            self._arrived.setdefault(id, time.perf_counter())
            if grammar is None:
                self._waiting.append(request)
            else:
                self._parked.add(request)
        except (RequestError, OverflowError) as error:
            self._arrived.pop(id, None)
            return News(id, finish_reason="error", error=str(error), refused=True)
        return None

    def _news(self, request: Request, token: int | None, extras: Extras | None, has_ended: bool) -> News:
        id = int(request.request_id)
        logprobs, prompt_logprobs, hidden = extras or Extras()
        pooling = self._poolings.pop(id, None) if has_ended else None
        embedding = None
        if pooling is not None and hidden is not None:
            embedding = pooled(hidden, pooling).numpy().astype("<f4").tobytes()
        return News(
            id,
            token,
            str(request.finish_reason) if has_ended else None,
            request.stop_reason if has_ended else None,
            request.num_cached_tokens,
            None if logprobs is None else _listed(logprobs),
            None if prompt_logprobs is None else {at: _listed(each) for at, each in prompt_logprobs.items()},
            embedding,
            request.error if has_ended else None,
            request.is_at_fault,
            self._queued.pop(id, 0.0),
        )


def _listed(logprobs: dict[int, Logprob]) -> TokenLogprobs:
    return [(token, entry.logprob, entry.rank) for token, entry in logprobs.items()]
