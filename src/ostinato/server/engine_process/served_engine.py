"""Requests of the wire on the engine core: commands in, one list of news per step out."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress

from ostinato.engine.adapters.lora_request import LoRARequest
from ostinato.engine.adapters.slots import AdapterVersion
from ostinato.engine.core import EngineCore
from ostinato.engine.delivery.pooling import judged, pooled
from ostinato.engine.outputs import Logprob
from ostinato.engine.parameters.sampling_params import RequestError, SamplingParams
from ostinato.engine.scheduling.drain import Announced
from ostinato.engine.scheduling.request import Request, RequestStatus
from ostinato.engine.stepping.flight import Extras, Progress
from ostinato.engine.token_ids import IntArray, token_array
from ostinato.models.adapters.adapter import Adapter

from ..wire.messages import JUDGED, Embed, Generate, News, Standing, StepNews, TokenLogprobs
from .adapter_reading import AdapterReading
from .intake import Group, Intake


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
        self._adapted: set[Request] = set()
        """Those with adapters, who may wait for a slot besides."""
        self._queued: dict[int, float] = {}
        """How long those waited that have had no news yet."""
        self._begun: set[int] = set()
        """Requests whose first news is out, and with it what is told once."""
        self._batch: tuple[Request, ...] = ()
        self._batch_ids: list[int] = []
        """Of the last step; while the same requests go on, nothing about them has to be worked out."""
        self._batch_tenants: Counter[tuple[str, float]] = Counter()
        """Tokens of these by tenant and weight."""
        self.intake = Intake(core.scheduler, self._hand_over, core.config.config.seed)
        """What has arrived and waits for its turn to wait for its turn."""
        self._reading = None if core.adapters is None else AdapterReading(core.adapters)
        self._unread: dict[int, Announced] = {}
        """Requests whose adapters are being read."""
        self._aborted_unread: set[int] = set()
        self._refused_late: list[list[News]] = []

    @property
    def is_busy(self) -> bool:
        """Whether a step would do something."""
        return self.core.can_step

    def generate(self, command: Generate) -> list[News]:
        """Take in completions of one prompt; returns news of those that are refused."""
        self.intake.add(command)
        return self.intake.feed()

    def embed(self, command: Embed) -> list[News]:
        """Take in an embedding; returns news if it is refused."""
        self.intake.add(command)
        return self.intake.feed()

    def _hand_over(self, group: Group, number: int) -> News | None:
        """Queues one completion or embedding of those that have arrived; returns news if it is refused."""
        command = group.command
        id = command.id + number
        self._arrived[id] = group.arrived
        if group.prompt is None:
            with suppress(OverflowError):  # completions share the array
                group.prompt = token_array(command.prompt_ids)
        prompt = command.prompt_ids if group.prompt is None else group.prompt
        params = command.params.seeded(number) if isinstance(command, Generate) else None
        if group.seeds is not None:
            assert params is not None
            params.seed = group.seeds[number]

        def add(adapter: AdapterVersion | None) -> News | None:
            refused = self._add(id, prompt, params, command, adapter)
            if refused is None and isinstance(command, Embed):
                self._poolings[id] = command.pooling
            return refused

        return self._with_adapter(id, command.adapter, add)

    def _with_adapter(
        self, id: int, name: str | None, add: Callable[[AdapterVersion | None], News | None]
    ) -> News | None:
        """Queue a request as soon as its adapter is on the host."""
        if name is None:
            return add(None)
        adapters, reading = self.core.adapters, self._reading
        asked = None if adapters is None else adapters.named(name)
        if asked is None or adapters is None or reading is None:
            return self._not_loaded(id, name)
        told: list[News] = []
        arrivals = self.core.scheduler.arrivals

        def added(asked: LoRARequest, read: Adapter | None) -> News | None:
            try:
                return add(adapters.version_of(asked, read))
            except RequestError as error:
                return self._refused(id, str(error))

        def go_on(asked: LoRARequest, read: Adapter | None) -> None:
            if id in self._aborted_unread:
                self._aborted_unread.discard(id)
                return
            now = adapters.named(name)  # it may have been unloaded or replaced meanwhile
            if now is not None and adapters.path_to_read(now) not in (None, asked.lora_path):
                reading.when_there(now, go_on)
                return
            with arrivals.arrival(self._unread.pop(id, None)):
                refused = self._not_loaded(id, name) if now is None else added(now, read)
            if refused is not None:
                told.append(refused)

        if reading.when_there(asked, go_on):
            return told[0] if told else None
        self._unread[id] = arrivals.announce()
        self._refused_late.append(told)
        return None

    @property
    def waits_for_files(self) -> bool:
        """Whether `carry_on` should be called soon."""
        return self._reading is not None and self._reading.is_under_way

    def carry_on(self) -> list[News]:
        """Queue requests whose adapters were read, and those that there is room for now, between two steps;
        returns news of those that are refused."""
        if self._reading is None or not self._reading.is_under_way:
            return self.intake.feed()
        self._reading.carry_on()
        news = self.intake.feed()
        news += [each for told in self._refused_late for each in told]
        for told in self._refused_late:
            told.clear()
        if not self._reading.is_under_way:
            self._refused_late.clear()
        return news

    def _not_loaded(self, id: int, name: str) -> News:
        return self._refused(id, f"the adapter {name!r} is not loaded", lacks_adapter=True)

    def _refused(self, id: int, why: str, *, lacks_adapter: bool = False) -> News:
        self._arrived.pop(id, None)
        return News(id, finish_reason="error", error=why, refused=True, lacks_adapter=lacks_adapter)

    def abort(self, ids: list[int]) -> list[News]:
        """End these requests; news of those that were unfinished."""
        unread = self._unread.keys() & set(ids)
        for id in unread:
            self.core.scheduler.arrivals.withdraw(self._unread.pop(id))
        self._aborted_unread |= unread
        ended = [id for id in ids if id in unread or self.intake.withdraw(id) or self.core.abort(str(id))]
        for id in ended:
            self._poolings.pop(id, None)
            self._begun.discard(id)
            self._arrived.pop(id, None)
            self._queued.pop(id, None)
        return [News(id, finish_reason="abort") for id in ended]

    def abort_all(self) -> list[News]:
        """End all requests; news of them."""
        queued = [int(request.request_id) for request in self.core.scheduler.unfinished]
        return self.abort([*self._unread, *queued, *self.intake.ids])

    @property
    def standing(self) -> Standing:
        """How the engine stands."""
        core = self.core
        why = core.sleeper.why_no_step
        if why is None and core.scheduler.is_paused:
            why = "generation is paused"
        return Standing(core.weights.version, core.is_paused, core.sleeper.is_sleeping, why)

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
            self.intake.charge(self._batch_tenants)
        return told

    def _note_admitted(self, began: float) -> None:
        """See who left the queue in the step that began then."""
        if self._parked:
            released = {request for request in self._parked if request not in self.core.scheduler.parked}
            self._parked -= released
            self._waiting.extend(sorted(released, key=lambda request: request.order))
        if self._adapted:
            # Whoever waits for a slot of its adapter is passed by others.
            begun = {each for each in self._adapted if each.status is not RequestStatus.WAITING}
            self._adapted -= begun
            for request in begun:
                self._note_first_step(request, began)
        while self._waiting and self._waiting[0].status is not RequestStatus.WAITING:
            self._note_first_step(self._waiting.popleft(), began)

    def _note_first_step(self, request: Request, began: float) -> None:
        id = int(request.request_id)
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
        self._batch_tenants = Counter((request.tenant, request.weight) for request in requests)

    def _add(
        self,
        id: int,
        prompt: list[int] | IntArray,
        params: SamplingParams | None,
        command: Generate | Embed,
        adapter: AdapterVersion | None,
    ) -> News | None:
        why = self.core.sleeper.why_no_step
        if why is not None and not self.core.is_paused:
            # Nobody has said that there will be weights; of a sleep or a pause the end may be waited for.
            self._arrived.pop(id, None)
            return News(id, finish_reason="error", error=why)
        try:
            eos = self.core.loaded.eos_token_ids
            grammar = None if params is None else self.core.following.text(params, command.tenant)
            request = Request(
                str(id),
                token_array(prompt),
                params,
                eos,
                grammar,
                command.cache_salt,
                adapter,
                command.tenant,
                command.weight,
            )
            self.core.add(request)
            self._arrived.setdefault(id, time.perf_counter())
            if adapter is not None:
                self._adapted.add(request)
            elif grammar is None:
                self._waiting.append(request)
            else:
                self._parked.add(request)
        except (RequestError, OverflowError) as error:
            return self._refused(id, str(error))
        return None

    def _news(self, request: Request, token: int | None, extras: Extras | None, has_ended: bool) -> News:
        id = int(request.request_id)
        logprobs, prompt_logprobs, hidden = extras or Extras()
        pooling = self._poolings.pop(id, None) if has_ended else None
        embedding = None
        if pooling is not None and hidden is not None:
            model = self.core.loaded.model
            vector = judged(model, hidden) if pooling == JUDGED else pooled(hidden, pooling)
            embedding = vector.numpy().astype("<f4").tobytes()
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
            _drafts(request) if has_ended else None,
        )


def _drafts(request: Request) -> tuple[list[int], list[int]] | None:
    drafts = request.drafts
    return None if drafts is None else (drafts.per_step_drafted, drafts.per_step_accepted)


def _listed(logprobs: dict[int, Logprob]) -> TokenLogprobs:
    return [(token, entry.logprob, entry.rank) for token, entry in logprobs.items()]
