"""The loop of the engine process: obey what was asked, run a step, say what it brought."""

from __future__ import annotations

import time

import zmq

from ostinato.engine.llm import LLM

from ..wire.messages import (
    Abort,
    Call,
    Command,
    Embed,
    Event,
    Generate,
    News,
    Reply,
    Standing,
    StepNews,
    Stop,
    decode_command,
    encode,
)
from .adapter_controls import AdapterControls
from .control_calls import ControlCalls
from .engine_controls import EngineControls
from .heartbeat import Heartbeat
from .served_engine import ServedEngine
from .statistics import StatisticsTaker
from .weight_controls import WeightControls

STATISTICS_EVERY = 0.5
"""Seconds between two messages of statistics."""
INTAKE_SECONDS = 0.02
"""After which a step comes before further commands."""

FILES_EVERY = 2
"""Milliseconds between two looks for an adapter that is being read, if there is nothing else to do."""


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
        controls = {
            **EngineControls(llm, self._engine, self._tell_step).by_name(),
            **WeightControls(llm).by_name(),
            **AdapterControls(llm.engine.core).by_name(),
        }
        self._calls = ControlCalls(controls, settle=self._settle, reply=self._answer, heartbeat=heartbeat)
        self._standing = Standing()
        self._arrivals = zmq.Poller()
        self._arrivals.register(commands, zmq.POLLIN)
        self._arrivals.register(self._calls.bell, zmq.POLLIN)
        self._statistics = StatisticsTaker(llm, self._engine.intake)
        self._next_statistics = 0.0
        self._stopping = False

    def serve(self) -> None:
        """Until `Stop`."""
        while not self._stopping:
            self._obey()
            self._calls.carry_on()
            self._tell(self._engine.carry_on())
            if self._engine.is_busy:
                with self._statistics.step():
                    brought = self._engine.step()
                self._tell_step(brought)
            if time.monotonic() >= self._next_statistics:
                self.publish_statistics()

    def publish_statistics(self) -> None:
        """Send the counters as they are now."""
        self._send(self._statistics.take())
        self._next_statistics = time.monotonic() + STATISTICS_EVERY

    def publish_standing(self) -> None:
        """Say how the engine stands, if that has changed."""
        standing = self._engine.standing
        if standing != self._standing:
            self._standing = standing
            self._send(standing)

    def _obey(self) -> None:
        """Carry out what has arrived; with nothing to step, wait for something to arrive.

        However much arrives, those who are served already get their next token meanwhile.
        """
        if not self._engine.is_busy:
            self._heartbeat.at_rest()
            self._arrivals.poll(self._rest_milliseconds)
        self._heartbeat.at_work()
        until = time.monotonic() + INTAKE_SECONDS
        while not self._stopping:
            try:
                message = self._commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._carry_out(decode_command(message))
            if time.monotonic() >= until and self._engine.is_busy:
                return

    @property
    def _rest_milliseconds(self) -> int:
        """How long to wait for something to arrive, with nothing to step."""
        if self._engine.intake.can_feed:
            return 0
        return FILES_EVERY if self._engine.waits_for_files else int(STATISTICS_EVERY * 1000)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Generate():
                self._tell(self._engine.generate(command))
            case Embed():
                self._tell(self._engine.embed(command))
            case Abort(ids, silent):
                ended = self._engine.abort(ids)
                if not silent:
                    self._tell(ended)
            case Call():
                self._calls.begin(command)
            case Stop():
                self._stopping = True

    def _answer(self, reply: Reply) -> None:
        self.publish_standing()
        self._send(reply)

    def _settle(self) -> None:
        """Wait for the steps under way; nobody hears of what they brought later than of what follows."""
        self._tell_step(self._engine.settle())

    def _tell(self, news: list[News]) -> None:
        if news:
            self._send(StepNews([], [], news))

    def _tell_step(self, brought: StepNews) -> None:
        if brought.ids or brought.news:
            self._send(brought)

    def _send(self, event: Event) -> None:
        self._events.send(encode(event))
