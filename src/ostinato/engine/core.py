"""The engine on token ids: requests in, tokens out, one step at a time."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ostinato.cache.pages import PageAllocator
from ostinato.graphs import OstinatoError, Report, frozen_gc

from .loading.device_memory import DeviceMemory
from .loading.load import LoadedModel, allocate_kv
from .loading.rehearsal import rehearse
from .outputs import Logprob
from .sampling.prompt_logprobs import prompt_logprobs_of
from .sampling.sampler import Sampler
from .sampling_params import RequestError, SamplingParams
from .scheduling.request import FinishReason, Request
from .scheduling.scheduled_step import CompletedStep, ScheduledStep
from .scheduling.scheduler import Scheduler
from .scheduling.scheduler_config import SchedulerConfig, window_of
from .stepping.model_runner import ModelRunner
from .stepping.prompt_states import PromptStates, PromptSums
from .stepping.times import StartupTimes, StepClock
from .stepping.token_return import Launched, Sampled

logger = logging.getLogger("ostinato.engine")


class Extras(NamedTuple):
    """What a step brought a request beside its token."""

    logprobs: dict[int, Logprob] | None = None
    """Of that token and of the likeliest ones, if asked for."""
    prompt_logprobs: dict[int, dict[int, Logprob]] | None = None
    """By position in the prompt, those that this step brought, if asked for; the first token has none."""
    hidden: PromptStates | None = None
    """For an embedding whose prompt is computed: its hidden states."""


class Progress(NamedTuple):
    """What one step brought."""

    requests: tuple[Request, ...]
    """Those that got a token; the very same tuple as in the step before while nothing changes."""
    tokens: list[int]
    """The token of each."""
    ended: tuple[Request, ...]
    """Those that ended with the step, with a token or without."""
    extras: dict[Request, Extras]
    """Of those that got more than a token, or something else."""


@dataclass(frozen=True)
class _Flight:
    """A step on the device."""

    step: ScheduledStep
    launched: Launched | None
    prompt_logprobs: dict[str, dict[int, dict[int, Logprob]]]
    hidden: dict[str, PromptStates]
    constrained: list[int]
    is_timed: bool
    """Whether the device notes its beginning, and another step was under way when it was launched."""


class EngineCore:
    """A loaded model, its KV cache, its graphs, its scheduler and its sampler."""

    def __init__(
        self, loaded: LoadedModel, *, progress: bool | None = None, startup: StartupTimes | None = None
    ) -> None:
        """Allocate and capture; `progress` shows a bar (default: when standard error is a terminal).

        `startup`: times of what was done before.
        """
        config = loaded.config
        self.config = config
        self.loaded = loaded
        self.clock = StepClock()
        """CPU time of the steps."""
        self.startup = startup or StartupTimes()
        """Time that the phases of the start took."""
        # Once for all captures of the start: walking the modules of torch takes a tenth of a second.
        with frozen_gc(not config.config.enable_cudagraph_gc):
            self._start(progress)

    def _start(self, progress: bool | None) -> None:
        loaded, config = self.loaded, self.config
        graph_bytes = rehearse(loaded, self.startup)
        with self.startup.phase("kv"):
            kv = allocate_kv(loaded.model, config, graph_bytes)
        self.runner = ModelRunner(loaded.model, kv, loaded.attention, config)
        self.sampler = Sampler(self.runner) if loaded.model.config.has_lm_head else None
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_running=config.max_running_requests,
                max_batched_tokens=config.max_batched_tokens,
                max_model_len=config.max_model_len,
                chunked_prefill=config.config.enable_chunked_prefill,
                prefix_caching=config.config.enable_prefix_caching,
                shared_prefixes=config.config.enable_cascade_attention,
                lookahead=config.lookahead,
                prompt_burst=config.config.prompt_burst,
                window=window_of(loaded.model.config.layer_windows, config.max_model_len),
            ),
            PageAllocator(kv.num_pages),
        )
        self._flights: deque[_Flight] = deque()
        self._prompt_sums = PromptSums(config.max_rows)
        before = DeviceMemory.now(config.device)
        report = self.runner.capture(self.startup, progress=progress)
        if self.sampler is not None:
            with self.startup.phase("capture sampling"):
                self.sampler.capture(progress=False)
        self._captured = DeviceMemory.now(config.device).less(before)
        logger.info("%s", report)
        logger.info("memory: %s", ", ".join(f"{name} {size:,}" for name, size in self.memory().items()))

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step under way."""
        return self.scheduler.has_work

    @property
    def can_step(self) -> bool:
        """Whether a step would do something: requests that are paused wait without one."""
        scheduler = self.scheduler
        return scheduler.has_work and (not scheduler.is_paused or scheduler.num_steps_in_flight > 0)

    def add(self, request: Request) -> None:
        """Queue a request; RequestError if it cannot be served."""
        vocab = self.loaded.model.config.vocab_size
        if request.prompt_ids.max() >= vocab:
            raise RequestError(
                f"request {request.request_id}: token id {request.prompt_ids.max()} is outside the model's "
                f"vocabulary of {vocab}"
            )
        if request.params is not None:
            self._check(request.request_id, request.params)
        self.scheduler.add(request)

    def _check(self, request_id: str, params: SamplingParams) -> None:
        if self.sampler is None:
            name = self.loaded.model.config.architecture
            raise RequestError(
                f"request {request_id}: {name} has no output layer; it embeds only, use embed()"
            )
        self.sampler.check(params)

    def abort(self, request_id: str) -> bool:
        """End a request now. False if it is unknown or finished already."""
        return self.scheduler.abort(request_id)

    def step(self) -> list[Progress]:
        """Launch the next step, then take in the oldest one that is due."""
        self.clock.start()
        if len(self._flights) > self.config.lookahead:  # an interrupt came while its tokens were waited for
            return self._complete()
        step = self.scheduler.schedule()
        self.clock.lap("schedule")
        if step is not None:
            self.clock.steps += 1
            try:
                self._flights.append(self._launch(step))
            except (RuntimeError, OstinatoError) as error:
                return self._fail(step, error)
            except BaseException as error:
                # An interrupt, or a bug: whoever called is told, and the books are closed on the step.
                self._fail(step, error)
                raise
            self.clock.lap("launch")
        if self._flights and (step is None or len(self._flights) > self.config.lookahead):
            return self._complete()
        return []

    def report(self) -> Report:
        """The forward graphs and what ran without one; sampling behind them has its own, `sampler.report`.

        Decode steps that should have read a shared prefix once, and had a plain graph only, are replays like
        others; `lowered` says how many and why.
        """
        report = self.runner.graphs.report()
        missed = self.runner.missed_cascades
        if not missed:
            return report
        counts = ", ".join(f"{reason} {count:,}" for reason, count in missed.items())
        lowered = f"decode steps that should have read a shared prefix once and did not: {counts}"
        return replace(report, lowered=f"{report.lowered} {lowered}" if report.lowered else lowered)

    def memory(self) -> dict[str, int]:
        """Bytes by what they are for; see `LLM.memory_report`."""
        runner = self.runner
        tensors = [*self.loaded.model.parameters(), *self.loaded.model.buffers()]
        outputs = (runner.logits, runner.hidden)
        return {
            "weights": sum(tensor.nbytes for tensor in tensors),
            "kv": runner.kv.num_bytes,
            "inputs": runner.graphs.buffers.bytes + runner.rows.num_bytes,
            "outputs": sum(tensor.nbytes for tensor in outputs),
            "sampling": 0 if self.sampler is None else self.sampler.num_bytes,
            "activations": runner.graphs.pool.bytes,
            # What was allocated while capturing and is in no pool is there for the libraries' sake.
            "workspace": max(0, self._captured.allocated - runner.graphs.pool.bytes),
            "graphs": max(0, self._captured.taken - self._captured.reserved),
        }

    def close(self) -> None:
        """Abort everything and drop all graphs."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self.scheduler.abort(request.request_id)
        self._drain()
        if self.sampler is not None:
            self.sampler.drop()
        self.runner.rows.drop()
        self.runner.graphs.drop()

    # -- the verbs of a step -----------------------------------------------------------------------

    def _launch(self, step: ScheduledStep) -> _Flight:
        self.runner.returned.settle()
        self.runner.update_pages(step.page_updates)
        self.runner.update_prefix(step)
        if self.sampler is not None:
            self.sampler.join(step.joined)
        self.runner.rows.send()
        self.runner.run(step)
        prompt_logprobs, hidden = self._beside_tokens(step)
        launched, constrained = None, list[int]()
        if self.sampler is not None and (step.is_uniform_decode or step.samples.any()):
            constrained = self._constrained(step)
            self.sampler.mask([step.requests[at] for at in constrained])
            launched = self.sampler.launch(step)
        is_timed = bool(self._flights) and self.runner.notes_beginning
        return _Flight(step, launched, prompt_logprobs, hidden, constrained, is_timed)

    def _constrained(self, step: ScheduledStep) -> list[int]:
        """Which requests of a step get their next token from a grammar."""
        rows = self.scheduler.rows
        if not rows.num_waiting:
            return []
        found: list[int] = np.flatnonzero(rows.waits[step.rows] & step.samples).tolist()
        return found

    def _beside_tokens(
        self, step: ScheduledStep
    ) -> tuple[dict[str, dict[int, dict[int, Logprob]]], dict[str, PromptStates]]:
        """What embeddings and prompt logprobs need of this step, before the next one overwrites it."""
        logprobs: dict[str, dict[int, dict[int, Logprob]]] = {}
        hidden: dict[str, PromptStates] = {}
        if step.is_uniform_decode:
            return logprobs, hidden
        for at, (request, count) in enumerate(step.items):
            begin = int(step.query_starts[at])
            states = self.runner.hidden[begin : begin + count]
            start = int(step.starts[at])
            if request.params is None:
                if (embedded := self._prompt_sums.add(request, states, start)) is not None:
                    hidden[request.request_id] = embedded
            elif request.params.prompt_logprobs is not None:
                found = prompt_logprobs_of(
                    self.loaded.model, states, request.prompt_ids, start, request.params.prompt_logprobs
                )
                logprobs[request.request_id] = dict(enumerate(found, start + 1))
        return logprobs, hidden

    def _complete(self) -> list[Progress]:
        """Take in the oldest step under way."""
        flight = self._flights[0]
        step = flight.step
        sampled = flight.launched.read() if flight.launched is not None else None
        self._flights.popleft()  # not before: an interrupt during the wait must leave it there
        self.clock.lap("wait")
        span = None if sampled is None else sampled.span
        self.clock.on_device(span, counts=flight.is_timed)
        tokens = np.zeros(step.num_requests, dtype=np.int64) if sampled is None else sampled.tokens
        done = self.scheduler.complete(step, tokens)
        ended = done.finished
        for at in flight.constrained:
            if done.accepted[at]:
                ended += self._follow_grammar(step.requests[at], int(tokens[at]))
        self.clock.lap("complete")
        return [self._progress(flight, done, sampled, ended)]

    def _progress(
        self, flight: _Flight, done: CompletedStep, sampled: Sampled | None, ended: tuple[Request, ...]
    ) -> Progress:
        requests, tokens = flight.step.requests, done.tokens
        if np.count_nonzero(done.accepted) < len(requests):
            places = np.flatnonzero(done.accepted)
            requests, tokens = tuple([requests[at] for at in places.tolist()]), tokens[places]
        extras: dict[Request, Extras] = {}
        if flight.prompt_logprobs or flight.hidden or (sampled is not None and sampled.logprobs is not None):
            extras = _extras(flight, done, sampled, ended)
        return Progress(requests, tokens.tolist(), ended, extras)

    def _follow_grammar(self, request: Request, token: int) -> tuple[Request, ...]:
        """The request, if that ends it."""
        assert request.grammar is not None
        follows = request.grammar.accept(token)
        if request.is_finished:
            return ()
        if not follows:
            # min_tokens or a bias left no allowed token.
            self.scheduler.finish(
                request,
                FinishReason.ERROR,
                error=f"token {token} is not allowed by the structured output: its other sampling "
                "parameters leave no token that is",
                is_at_fault=True,
            )
        elif request.grammar.is_terminated:
            self.scheduler.finish(request, FinishReason.STOP)
        return (request,) if request.is_finished else ()

    def _drain(self) -> list[Progress]:
        progress = []
        while self._flights:
            progress += self._complete()
        return progress

    def _fail(self, step: ScheduledStep, error: BaseException) -> list[Progress]:
        logger.exception("step %d failed", step.index)
        self.runner.returned.doubt()
        progress = self._drain()
        message = f"the step failed on {self.config.device}: {type(error).__name__}: {error}"
        return [*progress, Progress((), [], self.scheduler.fail(step, message), {})]

    def finish(self, request: Request, stop_reason: str) -> None:
        """End a request because its text contains a stop string."""
        if not request.is_finished:
            self.scheduler.finish(request, FinishReason.STOP, stop_reason=stop_reason)


def _extras(
    flight: _Flight, done: CompletedStep, sampled: Sampled | None, ended: tuple[Request, ...]
) -> dict[Request, Extras]:
    found: dict[Request, Extras] = {}
    for at, request in enumerate(flight.step.requests):
        if request.is_finished and request not in ended:
            continue  # it left while the step was under way
        name = request.request_id
        logprobs = _logprobs(request, sampled, at) if done.accepted[at] else None
        extras = Extras(logprobs, flight.prompt_logprobs.get(name), flight.hidden.get(name))
        if any(part is not None for part in extras):
            found[request] = extras
    return found


def _logprobs(request: Request, sampled: Sampled | None, at: int) -> dict[int, Logprob] | None:
    asked = request.params.logprobs if request.params is not None else None
    if asked is None or sampled is None or sampled.logprobs is None:
        return None
    assert sampled.logprob_tokens is not None
    assert sampled.ranks is not None
    values = sampled.logprobs[at, : asked + 1].tolist()
    tokens = sampled.logprob_tokens[at, : asked + 1].tolist()
    ranks = [int(sampled.ranks[at]), *range(1, asked + 1)]
    # The sampled token comes first and may be among the likeliest as well.
    found: dict[int, Logprob] = {}
    for token, value, rank in zip(tokens, values, ranks, strict=False):
        found.setdefault(token, Logprob(value, rank))
    return found
