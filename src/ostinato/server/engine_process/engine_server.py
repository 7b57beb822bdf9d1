"""The loop of the engine process: obey what was asked, run a step, say what it brought."""

from __future__ import annotations

import json
import time

import msgspec
import zmq

from ostinato.engine.llm import LLM
from ostinato.engine.step_profiler import StepProfiler
from ostinato.graphs import OstinatoError

from ..wire.messages import (
    Abort,
    Call,
    Command,
    Embed,
    Event,
    Generate,
    News,
    Reply,
    StepNews,
    Stop,
    decode_command,
    encode,
)
from .heartbeat import Heartbeat
from .served_engine import ServedEngine
from .statistics import StatisticsTaker

STATISTICS_EVERY = 0.5
"""Seconds between two messages of statistics."""


class EngineServer:
    """Serves one `LLM` to whoever is at the other end of the sockets, until told to stop."""

    def __init__(
        self,
        llm: LLM,
        commands: zmq.Socket[bytes],
        events: zmq.Socket[bytes],
        heartbeat: Heartbeat,
    ) -> None:
        self._llm = llm
        self._engine = ServedEngine(llm.engine.core)
        self._commands = commands
        self._events = events
        self._heartbeat = heartbeat
        self._profiler = StepProfiler()
        self._statistics = StatisticsTaker(llm)
        self._next_statistics = 0.0
        self._stopping = False

    def serve(self) -> None:
        """Until `Stop`."""
        while not self._stopping:
            self._obey()
            if self._engine.is_busy:
                with self._statistics.step():
                    brought = self._engine.step()
                if brought.ids or brought.news:
                    self._send(brought)
            if time.monotonic() >= self._next_statistics:
                self.publish_statistics()

    def publish_statistics(self) -> None:
        """Send the counters as they are now."""
        self._send(self._statistics.take())
        self._next_statistics = time.monotonic() + STATISTICS_EVERY

    def _obey(self) -> None:
        """Carry out all that has arrived; with nothing to step, wait for something to arrive."""
        if not self._engine.is_busy:
            self._heartbeat.at_rest()
            self._commands.poll(int(STATISTICS_EVERY * 1000))
        self._heartbeat.at_work()
        while not self._stopping:
            try:
                message = self._commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._carry_out(decode_command(message))

    def _carry_out(self, command: Command) -> None:
        match command:
            case Generate():
                self._tell_one(self._engine.generate(command))
            case Embed():
                self._tell_one(self._engine.embed(command))
            case Abort(ids, silent):
                ended = self._engine.abort(ids)
                if not silent:
                    self._tell(ended)
            case Call():
                self._send(self._reply(command))
            case Stop():
                self._stopping = True

    def _reply(self, call: Call) -> Reply:
        try:
            return Reply(call.call, msgspec.json.encode(self._called(call.action, call.argument)))
        except (OstinatoError, RuntimeError, OSError) as error:
            return Reply(call.call, error=f"{type(error).__name__}: {error}")

    def _called(self, action: str, argument: str) -> object:
        scheduler = self._engine.core.scheduler
        match action:
            case "flush_cache":
                scheduler.flush_prefix_cache()
                return {"flushed": True}
            case "pause":
                scheduler.pause()
                return {"paused": True}
            case "continue":
                scheduler.resume()
                return {"paused": False}
            case "graphs":
                return self._graphs()
            case "check_integrity":
                scheduler.check_integrity()
                return {"pages_free": scheduler.pages.num_free, "pages_usable": scheduler.pages.num_usable}
            case "start_profile":
                return {"file": self._profiler.start(argument)}
            case "stop_profile":
                return {"file": self._profiler.stop()}
        raise RuntimeError(f"the engine process knows no {action}")

    def _graphs(self) -> object:
        sampling = self._llm.sampling_report()
        return {
            "forward": json.loads(self._llm.graph_report().json()),
            "sampling": None if sampling is None else json.loads(sampling.json()),
            "memory": self._llm.memory_report(),
        }

    def _tell_one(self, news: News | None) -> None:
        if news is not None:
            self._tell([news])

    def _tell(self, news: list[News]) -> None:
        if news:
            self._send(StepNews([], [], news))

    def _send(self, event: Event) -> None:
        self._events.send(encode(event))
