"""The controls of the engine itself, by name; see `control_calls` for what a control is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import RequestError
from ostinato.engine.sleeping.sleeper import check_mode
from ostinato.engine.step_profiler import StepProfiler

from ..wire.messages import StepNews
from .control_calls import Control, Waiting
from .served_engine import ServedEngine


class EngineControls:
    """What can be done with one engine."""

    def __init__(self, llm: LLM, engine: ServedEngine, tell: Callable[[StepNews], None]) -> None:
        """`tell` sends news of requests."""
        self._llm = llm
        self._engine = engine
        self._tell = tell
        self._profiler = StepProfiler()

    def by_name(self) -> Mapping[str, Control]:
        """All that a call can name."""
        return {
            "flush_cache": self._flush_cache,
            "graphs": self._graphs,
            "pause": self._pause,
            "release_memory": self._release_memory,
            "reset_prefix_cache": self._reset_prefix_cache,
            "resume": self._resume,
            "resume_memory": self._resume_memory,
            "sleep": self._sleep,
            "start_profile": self._start_profile,
            "stop_profile": self._stop_profile,
            "wake_up": self._wake_up,
        }

    # -- sleep and pause ---------------------------------------------------------------------------

    def _sleep(self, level: int, mode: str) -> Waiting:
        self._engine.core.sleeper.check(level, mode)
        yield from self._quiet_down(mode)
        yield from self._get_on(takes_pages=level > 0 and mode == "keep")
        return self._engine.core.sleep(level)

    def _wake_up(self, tags: list[str] | None) -> object:
        return self._engine.core.wake_up(tags)

    def _release_memory(self, tags: list[str] | None) -> Waiting:
        """Of some tags; requests go on afterwards."""
        sleeper = self._engine.core.sleeper
        sleeper.check(1, "keep")
        yield from self._get_on(takes_pages="kv_cache" in sleeper.checked(tags))
        return self._engine.core.sleep(1, tags)

    def _resume_memory(self, tags: list[str] | None) -> object:
        """A pause stays a pause."""
        return self._engine.core.wake_up(tags, resumes=False)

    def _pause(self, mode: str, clear_cache: bool) -> Waiting:
        check_mode(mode)
        yield from self._quiet_down(mode)
        yield from self._get_on(takes_pages=clear_cache and mode == "keep")
        self._engine.core.pause(clear_cache=clear_cache)
        return None

    def _resume(self) -> None:
        self._engine.core.resume()

    def _quiet_down(self, mode: str) -> Generator[None, Any, None]:
        """As `TextEngine` does it, but that others are served meanwhile and any request may be aborted."""
        core = self._engine.core
        if mode == "wait":
            core.scheduler.drain()
            while core.still_drains:
                yield
            self._tell(self._engine.settle())
        elif mode == "abort":
            self._tell(StepNews([], [], self._engine.abort_all()))

    def _get_on(self, *, takes_pages: bool) -> Generator[None, Any, None]:
        """What `takes_pages` of all requests waits until those of the last time have brought somebody on."""
        if takes_pages and self._engine.core.owes_progress:
            while self._engine.core.owes_progress:
                yield
            self._tell(self._engine.settle())

    # -- cached prefixes ---------------------------------------------------------------------------

    def _reset_prefix_cache(self, running: bool) -> Waiting:
        yield from self._get_on(takes_pages=running)
        self._engine.core.scheduler.flush_prefix_cache(computes_again=running)
        return {"success": True}

    def _flush_cache(self, timeout: float) -> Waiting:
        """Only while nobody has KV, or is about to: wait for that as long as this."""
        scheduler, end = self._engine.core.scheduler, time.monotonic() + timeout
        intake = self._engine.intake
        while scheduler.running or (scheduler.num_waiting + len(intake) and not self._engine.core.is_paused):
            if time.monotonic() >= end:
                running, waiting = len(scheduler.running), scheduler.num_waiting + len(intake)
                raise RequestError(f"the cache is in use: {running} requests run, {waiting} wait")
            yield None
        scheduler.flush_prefix_cache()
        return {"flushed": True}

    # -- what it does ------------------------------------------------------------------------------

    def _start_profile(self, file: str) -> object:
        try:
            return {"file": self._profiler.start(file)}
        except RuntimeError as error:
            raise RequestError(str(error)) from error

    def _stop_profile(self) -> object:
        try:
            return {"file": self._profiler.stop()}
        except RuntimeError as error:
            raise RequestError(str(error)) from error

    def _graphs(self) -> object:
        sampling = self._llm.sampling_report()
        return {
            "forward": json.loads(self._llm.graph_report().json()),
            "sampling": None if sampling is None else json.loads(sampling.json()),
            "memory": self._llm.memory_report(),
            "last_sleep": self._engine.core.sleeper.last_sleep,
            "last_wake": self._engine.core.sleeper.last_wake,
        }
