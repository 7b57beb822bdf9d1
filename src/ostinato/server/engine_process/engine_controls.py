"""The controls of the engine itself, by name; see `control_calls` for what a control is."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ostinato.engine.llm import LLM
from ostinato.engine.sampling_params import RequestError
from ostinato.engine.step_profiler import StepProfiler

from .control_calls import Control
from .served_engine import ServedEngine


class EngineControls:
    """What can be done with one engine."""

    def __init__(self, llm: LLM, engine: ServedEngine) -> None:
        self._llm = llm
        self._engine = engine
        self._profiler = StepProfiler()

    def by_name(self) -> Mapping[str, Control]:
        """All that a call can name."""
        return {
            "continue": self._continue,
            "flush_cache": self._flush_cache,
            "graphs": self._graphs,
            "pause": self._pause,
            "start_profile": self._start_profile,
            "stop_profile": self._stop_profile,
        }

    def _flush_cache(self) -> object:
        self._engine.core.scheduler.flush_prefix_cache()
        return {"flushed": True}

    def _pause(self) -> object:
        self._engine.core.scheduler.pause()
        return {"paused": True}

    def _continue(self) -> object:
        self._engine.core.scheduler.resume()
        return {"paused": False}

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
        }
