"""The engine on token ids: requests in, tokens out, one step at a time.

Note [Failed steps]
A launch can fail anywhere: in a kernel, for lack of memory, by an interrupt between any two lines. Then:

- The requests of the step end with an error, once the steps before it have delivered their tokens. Until its
  last line is done, a launch counts as failed.
- Requests outside the step continue. What the step was to tell the device about them, pages above all, is
  sent again with the next step (`Scheduler.fail`); what the host has noted as a change stays noted until it
  has been sent (`DeviceRows.send`, `TokenMasks.send`).
- What the step has done on the device concerns only rows and pages of its own requests, which are gone. Their
  next owners write everything that they read. The count of lines is corrected (`TokenReturn.settle`).
- Results of earlier steps are kept until `step` returns them, if an interrupt comes in between.

Handling the tokens of a landed step can fail too: by a bug, for lack of memory, or by an exception that is
raised in the thread from outside (`HeldSignals` keeps signals away from calls of `LLM`). Then:

- The requests of that step end with an error, whatever the host had noted of its tokens by then, and all
  books (rows, pages, queues) are rebuilt from what the other requests have: `Scheduler.give_up`.
- A request whose grammar raises ends alone.
- If `schedule` itself raises, the failure belongs to no known request: all requests end.

Note [Grammars]
A grammar must see a token to say which may follow it, and the forward pass finds that token on the device. So
a step with such requests is launched in two parts: while its forward pass runs, the tokens of the previous
step are read, grammars follow them, and their masks are made; then it samples. Every request gets a token per
step. Bad words of several tokens and callers' functions (`logits_processors`) are applied at the same point.
A request that is left without any possible token ends there, with an error, as if aborted. Grammars are
followed in their own processes (`ostinato.grammars`): a request whose grammar is late leaves the batch.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import cast

import numpy as np

from ostinato.graphs import OstinatoError, Report
from ostinato.models.errors import WeightsError
from ostinato.models.weight_update import NamedTensors, TornWeightsError

from .engine_parts import put_together
from .loading.load import PlacedModel
from .parameters.sampling_params import RequestError, SamplingParams
from .sampling.logprobs import prompt_logprobs_of
from .scheduling.request import FinishReason, IntArray, Request
from .scheduling.scheduled_step import CompletedStep, ScheduledStep
from .sleeping.served_weights import DROPPED, WeightsReport
from .sleeping.sleeper import EngineAsleepError, SleepReport
from .stepping.flight import Flight, Progress
from .stepping.prompt_states import PromptSums
from .stepping.times import StartupTimes, StepClock
from .stepping.token_return import Sampled
from .token_ids import highest

logger = logging.getLogger("ostinato.engine")


class EngineCore:
    """A model, its KV cache, its graphs, its scheduler and its sampler."""

    def __init__(
        self, placed: PlacedModel, *, progress: bool | None = None, startup: StartupTimes | None = None
    ) -> None:
        """Read, allocate and capture; `progress` shows a bar (default: when standard error is a terminal).

        `startup`: times of the phases before this one.
        """
        config = placed.config
        self.config = config
        # Read in every step, and computing them takes longer than some parts of a step.
        self._lookahead, self._is_on_cpu = config.lookahead, config.device.type == "cpu"
        self.clock = StepClock()
        """CPU time of the steps."""
        self.startup = startup or StartupTimes()
        """Duration of each phase of the startup."""
        parts = put_together(placed, self.startup, progress)
        self.loaded = parts.loaded
        self.runner, self.sampler = parts.runner, parts.sampler
        self.scheduler, self.following = parts.scheduler, parts.following
        self.sleeper = parts.sleeper
        """Which memory is released while the engine sleeps, and whether it may take a step."""
        self.weights = parts.weights
        self.adapters = parts.adapters
        """The adapters that requests may use; None if no adapters are served."""
        self.prompt_bound = parts.prompt_bound
        """How many prompt tokens a step takes while streams run; None: as many as fit."""
        self.parts = parts
        """All parts of the engine, and the device memory they took."""
        self._flights: deque[Flight] = deque()
        self._arrived: list[Progress] = []
        self._prompt_sums = PromptSums(config.max_rows)

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, a step under way, or a result not yet returned."""
        return self.scheduler.has_work or bool(self._arrived)

    @property
    def can_step(self) -> bool:
        """Whether a step would do something: paused requests wait without steps."""
        scheduler = self.scheduler
        is_under_way = bool(self._arrived) or scheduler.num_steps_in_flight > 0
        may_launch = not scheduler.is_paused and self.sleeper.why_no_step is None
        return is_under_way or (scheduler.has_more_than_held and may_launch)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it cannot be served."""
        vocab = self.loaded.model.config.vocab_size
        found = highest(request.prompt_ids) if request.highest_id is None else request.highest_id
        if found >= vocab:
            raise RequestError(
                f"request {request.request_id}: token id {found} is outside the model's vocabulary of {vocab}"
            )
        if request.params is not None:
            self._check(request, request.params)
        if request.adapter is not None:
            assert self.adapters is not None
            self.adapters.check_runs(request.adapter)
        if request.grammar is not None:
            self.following.add(request)
        else:
            self.scheduler.add(request)

    def _check(self, request: Request, params: SamplingParams) -> None:
        if self.sampler is None:
            name = self.loaded.model.config.architecture
            raise RequestError(
                f"request {request.request_id}: {name} has no output layer; it only embeds: use embed()"
            )
        self.sampler.take(request, params)

    def abort(self, request_id: str) -> bool:
        """End a request now: no step adds to it any more. False if it is unknown or already finished."""
        kept = [progress.without(request_id) for progress in self._arrived]
        self._arrived = [progress for progress in kept if any(progress)]
        for flight in self._flights:
            if flight.landed is not None:
                flight.landed = tuple([part.without(request_id) for part in flight.landed])
        is_aborted = self.scheduler.abort(request_id)
        self.following.let_go()
        return is_aborted

    def step(self) -> list[Progress]:
        """Launch the next step, then process the oldest one that is due."""
        if not self._flights and not self._arrived:
            self.refuse_if_asleep()
        self.clock.start()
        self._finish_what_was_interrupted()
        if self.scheduler.parked:
            self._note_ended(self.following.attend())
        if not self._arrived:
            step = self._schedule()
            self.clock.lap("schedule")
            if step is not None:
                self._take_off(step)
                self._tidy_up()
            if self._flights and (step is None or len(self._flights) > self._lookahead):
                self._complete()
        self.following.let_go()
        arrived, self._arrived = self._arrived, []
        return arrived

    def refuse_if_asleep(self) -> None:
        """Raises EngineAsleepError while a step would touch memory that is released."""
        if (why := self.sleeper.why_no_step) is not None:
            raise EngineAsleepError(why)

    def settle(self) -> list[Progress]:
        """Wait for all steps under way and return their results. Launches no step."""
        self._drain()
        arrived, self._arrived = self._arrived, []
        return arrived

    @property
    def still_drains(self) -> bool:
        """Whether requests that existed before `Scheduler.drain` are still being served. Raises RequestError
        if another call has ended the drain and resumed."""
        scheduler, is_asleep = self.scheduler, self.sleeper.why_no_step is not None
        if not scheduler.is_draining and not scheduler.is_paused and not is_asleep:
            raise RequestError(
                "generation was resumed by another call: this one still waited for requests to finish"
            )
        return scheduler.is_draining and not scheduler.is_drained and not is_asleep

    @property
    def owes_progress(self) -> bool:
        """Whether a caller that takes the pages of all requests must wait for further steps first, because
        otherwise no request might ever advance (Note [Fair order] in `engine/scheduling/scheduler.py`)."""
        return self.can_step and self.scheduler.owes_progress

    def pause(self, *, clear_cache: bool) -> None:
        """Take no step until `resume`. `clear_cache`: forget cached prefixes; unfinished requests are then
        computed again. Call `settle` before."""
        assert not self._flights, "a step is under way"
        self.scheduler.pause()
        if clear_cache:
            self.scheduler.flush_prefix_cache(computes_again=True)

    def resume(self) -> None:
        """Take steps again as soon as memory and weights are back."""
        self.scheduler.resume()
        self.sleeper.let_go()

    @property
    def is_paused(self) -> bool:
        """Whether steps are stopped on purpose: by a pause, or by sleep."""
        return self.scheduler.is_paused or self.sleeper.is_sleeping

    def sleep(self, level: int, tags: Sequence[str] | None = None) -> SleepReport:
        """Release memory, all or that of these tags. Remaining requests wait; if their pages are gone, those
        that ran are computed again. Call `settle` before."""
        assert not self._flights, "a step is under way"
        checked = self.sleeper.checked(tags)
        if level and "kv_cache" in checked:
            self.scheduler.flush_prefix_cache(computes_again=True)
        return self.sleeper.sleep(level, checked)

    def wake_up(self, tags: Sequence[str] | None, *, resumes: bool = True) -> SleepReport:
        """Restore memory. When all of it is back, a pause ends too, if `resumes`."""
        report = self.sleeper.wake_up(tags, self._weights_are_gone)
        if resumes and not self.sleeper.is_sleeping:
            self.scheduler.resume()
        return report

    def _weights_are_gone(self) -> None:
        self.weights.are_gone(DROPPED)
        if self.adapters is not None:
            self.adapters.contents_are_gone()

    def update_weights(self, new: NamedTensors | str | Path, version: str | None) -> WeightsReport:
        """Write new weights in place and forget prefixes that were computed with the old ones; requests
        continue with the KV that they have. Call `settle` before."""
        assert not self._flights, "a step is under way"
        is_changed = True
        try:
            return self.weights.update(new, version)
        except (WeightsError, RequestError, EngineAsleepError) as error:
            is_changed = isinstance(error, TornWeightsError)
            raise
        finally:
            if is_changed:
                self.scheduler.flush_prefix_cache()

    def report(self) -> Report:
        """The forward graphs, and what ran without one; sampling outside of decode graphs has its own report,
        `sampler.report`.

        Decode steps that should have read a shared prefix once, but had only a plain graph, count as ordinary
        replays; `lowered` says how many and why.
        """
        report = self.runner.graphs.report()
        missed = self.runner.missed_cascades
        if not missed:
            return report
        counts = ", ".join(f"{reason} {count:,}" for reason, count in missed.items())
        lowered = f"decode steps that should have read a shared prefix once but did not: {counts}"
        return replace(report, lowered=f"{report.lowered} {lowered}" if report.lowered else lowered)

    def close(self) -> None:
        """Abort everything and drop all graphs."""
        self.scheduler.abort_all()
        self.following.close()
        self._drain()
        self._arrived.clear()
        if self.sampler is not None:
            self.sampler.drop()
        self.runner.rows.drop()
        if self.runner.speculation is not None:
            self.runner.speculation.drop()
        self.runner.graphs.drop()

    # -- the verbs of a step -----------------------------------------------------------------------

    def _schedule(self) -> ScheduledStep | None:
        try:
            return self.scheduler.schedule()
        except BaseException as error:
            logger.exception("scheduling failed")
            ended = self.scheduler.give_up(None, _told("scheduling failed", error))
            # The next owners of their rows and pages come after them on the device.
            self._flights.clear()
            self._arrived.append(Progress((), [], ended, {}))
            if not isinstance(error, Exception):
                raise
            return None

    def _take_off(self, step: ScheduledStep) -> None:
        """Launch a step. If that fails, its requests end, and all others continue as if the step had never
        existed: see Note [Failed steps]."""
        flight = Flight(step)
        self._flights.append(flight)
        self.clock.steps += 1
        began = perf_counter()
        try:
            self._launch(flight)
            flight.launch_seconds = perf_counter() - began
        except BaseException as error:
            flight.error = _told(f"the step failed on {self.config.device}", error)
            logger.exception("step %d failed", step.index)
            self._drain()
            # An interrupt or a bug is also raised to the caller.
            if not isinstance(error, RuntimeError | OstinatoError):
                raise
        self.clock.lap("launch")

    def _launch(self, flight: Flight) -> None:
        step = flight.step
        self.runner.returned.settle()
        self.runner.update_pages(step.page_updates)
        self.runner.update_prefix(step)
        self.runner.join(step.joined)
        if self.adapters is not None:
            self.adapters.send()
        if self.sampler is not None:
            self.sampler.join(step.joined)
            self.following.join(step.joined)
        self.runner.rows.send()
        self.runner.run(step)
        flight.follows = len(self._flights) > 1
        flight.is_timed = flight.follows and self.runner.notes_beginning
        self._keep_beside_tokens(flight)
        if self.sampler is not None and (step.is_uniform_decode or step.samples.any()):
            if self._waits_for_tokens(step):
                self.clock.lap("launch")
                while self._flights[0] is not flight:
                    self._complete()
            flight.whole_logprobs = self.sampler.whole_logprobs(step)
            waiting = self._constrained(step)
            if followed := [step.requests[at] for at in waiting if step.requests[at].grammar is not None]:
                self._note_ended(self.following.prepare(followed))
                waiting = self._constrained(step)  # some may have left
            flight.constrained = [at for at in waiting if step.requests[at].grammar is not None]
            self._refuse(self.sampler.mask([step.requests[at] for at in waiting]))
            self._refuse(self.sampler.process(step, waiting))
            flight.whole_logprobs |= self.sampler.whole_drawn_logprobs(step)
            flight.launched = self.sampler.launch(step)
        flight.error = None

    def _tidy_up(self) -> None:
        """Work that can wait until the device is busy. It affects only how fast prefixes are found."""
        try:
            self.scheduler.pages.catch_up()
        except Exception:
            logger.exception("cached pages could not be indexed in blocks; they are looked up one by one")

    def _refuse(self, stuck: dict[Request, str]) -> None:
        """End requests for which no token is left, before one is drawn."""
        self._note_ended(tuple(stuck))
        for request, error in stuck.items():
            self.scheduler.finish(request, FinishReason.ERROR, error=error, is_at_fault=True)

    def _note_ended(self, ended: tuple[Request, ...]) -> None:
        """Record requests that ended between two tokens."""
        if ended:
            self._arrived.append(Progress((), [], ended, {}))

    def _waits_for_tokens(self, step: ScheduledStep) -> bool:
        """Whether a request needs to see a token of a step under way to say which may follow."""
        rows = self.scheduler.rows
        if not rows.num_waiting or len(self._flights) == 1:
            return False
        # The token that this step samples is promised too.
        pending = rows.num_promised[step.rows] - rows.num_tokens[step.rows] > 1
        return bool((pending & rows.waits[step.rows] & step.samples).any())

    def _constrained(self, step: ScheduledStep) -> list[int]:
        """Which requests of a step get a token that depends on earlier ones, without those that left
        since."""
        rows = self.scheduler.rows
        if not rows.num_waiting:
            return []
        found: list[int] = np.flatnonzero(rows.waits[step.rows] & step.samples).tolist()
        return found

    def _keep_beside_tokens(self, flight: Flight) -> None:
        """Keep what embeddings and prompt logprobs need of this step, before the next one overwrites it."""
        step = flight.step
        if step.is_uniform_decode:
            return
        for at, request in enumerate(step.requests):
            if request.params is not None and request.params.prompt_logprobs is None:
                continue
            begin, start = int(step.query_starts[at]), int(step.starts[at])
            states = self.runner.hidden[begin : begin + int(step.num_new_tokens[at])]
            if request.params is None:
                if (embedded := self._prompt_sums.add(request, states, start)) is not None:
                    flight.hidden[request.request_id] = embedded
            else:
                assert request.params.prompt_logprobs is not None
                found = prompt_logprobs_of(
                    self.loaded.model, states, request.prompt_ids, start, request.params.prompt_logprobs
                )
                flight.prompt_logprobs[request.request_id] = dict(enumerate(found, start + 1))

    def _complete(self) -> None:
        """Wait for the oldest step under way and process its results. May be repeated after a failure."""
        flight = self._flights[0]
        if flight.landed is None:
            # It stays under way until its tokens are there: an interrupt during the wait changes nothing.
            began = perf_counter()
            sampled = self._read(flight)
            self._note_cost(flight, sampled, perf_counter() - began)
            self._take_in(flight, sampled)
        # In one line: an interrupt between two would return the results twice or not at all.
        self._arrived += cast(tuple[Progress, ...], self._flights.popleft().landed)
        self.clock.lap("complete")

    def _note_cost(self, flight: Flight, sampled: Sampled | None, waited: float) -> None:
        """Report how long the step took to what decides by it; `waited`: for the tokens of this step."""
        self.clock.lap("wait")
        between = self.clock.on_device(None if sampled is None else sampled.span, counts=flight.is_timed)
        if flight.error is not None:
            return
        if self._is_on_cpu:
            took: float | None = flight.launch_seconds
        elif flight.follows:
            took = between
        else:
            # The host can measure it only if it does nothing else meanwhile.
            is_seen = sampled is not None and not self._lookahead
            took = flight.launch_seconds + waited if is_seen else None
        if took is None:
            return
        if self.prompt_bound is not None:
            self.prompt_bound.note(flight.step, took)
        if self.runner.speculation is not None and flight.step.is_uniform_decode:
            self.runner.speculation.note_cost(
                flight.step, took if self._is_on_cpu or flight.is_timed else None
            )

    def _read(self, flight: Flight) -> Sampled | None:
        if flight.error is not None:
            self.runner.returned.doubt()
        elif flight.launched is not None:
            try:
                return flight.launched.read()
            except Exception as error:
                # Its requests end with the next step; the error is raised to the caller, for the device may
                # be gone.
                flight.error = _told(f"the step could not be read from {self.config.device}", error)
                raise
        return None

    def _take_in(self, flight: Flight, sampled: Sampled | None) -> None:
        """Enter the results of a step in the books. If that fails, its requests end, and no others."""
        try:
            flight.landed = self._booked(flight, sampled)
        except BaseException as error:
            logger.exception("the tokens of step %d could not be processed", flight.step.index)
            text = _told("the tokens of a step could not be processed", error)
            flight.landed = (Progress((), [], self.scheduler.give_up(flight.step, text), {}),)
            if not isinstance(error, Exception):
                raise

    def _booked(self, flight: Flight, sampled: Sampled | None) -> tuple[Progress, ...]:
        step = flight.step
        if flight.error is not None:
            return (Progress((), [], self.scheduler.fail(step, flight.error), {}),)
        tokens = np.zeros(step.num_requests, dtype=np.int64) if sampled is None else sampled.tokens
        done = self._completed(step, tokens, sampled)
        ended = done.finished
        if followed := [at for at in flight.constrained if done.accepted[at]]:
            requests = [step.requests[at] for at in followed]
            ended += self.following.follow(requests, [int(tokens[at]) for at in followed])
        return flight.progress(done, sampled, ended)

    def _completed(self, step: ScheduledStep, tokens: IntArray, sampled: Sampled | None) -> CompletedStep:
        if not step.num_drafts:
            return self.scheduler.complete(step, tokens)
        assert self.runner.speculation is not None
        assert sampled is not None
        assert sampled.further is not None
        assert sampled.num_new is not None
        num_new = sampled.num_new.copy()  # its line is written again soon
        done = self.scheduler.complete(step, np.concatenate([tokens[None], sampled.further]), num_new)
        self.runner.speculation.note(step, num_new, done.accepted)
        return done

    def _finish_what_was_interrupted(self) -> None:
        if self.scheduler.num_steps_in_flight != len(self._flights):
            known = [flight.step for flight in self._flights]
            self._flights += [Flight(step) for step in self.scheduler.in_flight if step not in known]
        while self._flights and (len(self._flights) > self._lookahead or self._is_interrupted):
            self._complete()

    @property
    def _is_interrupted(self) -> bool:
        """Whether a step under way has failed, or has landed but was not returned."""
        return any(flight.error is not None or flight.landed is not None for flight in self._flights)

    def _drain(self) -> None:
        while self._flights:
            self._complete()

    def finish(self, request: Request, stop_reason: str) -> None:
        """End a request because its text contains a stop string."""
        if not request.is_finished:
            self.scheduler.finish(request, FinishReason.STOP, stop_reason=stop_reason)


def _told(what: str, error: BaseException) -> str:
    return f"{what}: {type(error).__name__}: {error}"
