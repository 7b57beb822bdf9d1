"""Calls of controls: what an administrator has done in the engine's process, by name, between two steps.

A control is a function; a call's payload are its keywords, and what it returns, as JSON, is the reply. It
runs while no step is under way. One that cannot answer at once is a generator, and steps go on meanwhile:

    def drop_when_idle() -> Waiting:
        while engine.has_work:
            yield                       # a turn of the loop; a step may be under way behind it
        tensors = yield receive         # called in a thread of its own; none is under way behind it
        return update(tensors)

What `receive` raises is raised there. Calls do not wait for each other: what ends a wait may be another call.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any

import msgspec
import torch

from ostinato.engine.parameters.sampling_params import RequestError
from ostinato.engine.sleeping.sleeper import EngineAsleepError
from ostinato.graphs import OstinatoError
from ostinato.models.errors import ModelError

from ..wire.messages import Call, Fault, Reply, unpacked
from .heartbeat import Heartbeat

logger = logging.getLogger("ostinato.server")

Waiting = Generator[Callable[[], Any] | None, Any, object]
"""What a control is that cannot answer at once."""
Control = Callable[..., object]


class ControlCalls:
    """The calls under way. Nothing that a control raises ends the engine."""

    def __init__(
        self,
        controls: Mapping[str, Control],
        *,
        settle: Callable[[], None],
        reply: Callable[[Reply], None],
        heartbeat: Heartbeat,
    ) -> None:
        """`settle` waits for the steps under way and tells what they brought."""
        self._controls = controls
        self._settle = settle
        self._reply = reply
        self._heartbeat = heartbeat
        self._under_way: list[_UnderWay] = []
        self._bell, self._ringing = socket.socketpair()
        self._bell.setblocking(False)

    @property
    def bell(self) -> int:
        """A descriptor that is readable when a thread has ended: look for that beside commands."""
        return self._bell.fileno()

    def begin(self, call: Call) -> None:
        """Do what is asked, or as much of it as can be done now."""
        self._go_on(_UnderWay(call.call, lambda: self._started(call)))

    def carry_on(self) -> None:
        """Go on with those that waited; between two steps."""
        if not self._under_way:
            return
        self._hush()
        under_way, self._under_way = self._under_way, []
        for each in under_way:
            if each.is_ready:
                self._go_on(each)
            else:
                self._under_way.append(each)

    def _started(self, call: Call) -> object:
        control = self._controls.get(call.name)
        if control is None:
            raise RequestError(f"the engine process knows no {call.name}")
        return control(**unpacked(call.payload))

    def _go_on(self, each: _UnderWay) -> None:
        with self._heartbeat.uncounted():
            try:
                if each.needs_rest:
                    self._settle()
                if each.proceed(self._ring):
                    self._reply(Reply(each.call, msgspec.json.encode(each.result)))
                else:
                    self._under_way.append(each)
            except Exception as error:
                fault = _fault_of(error)
                if fault is Fault.ENGINE:
                    logger.exception("a call of a control failed")
                self._reply(Reply(each.call, error=_in_words(error), fault=fault))

    def _ring(self) -> None:
        self._ringing.send(b"!")

    def _hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._bell.recv(4096):
                pass


class _UnderWay:
    """One call."""

    def __init__(self, call: int, start: Callable[[], object]) -> None:
        self.call = call
        self.result: object = None
        self._start: Callable[[], object] | None = start
        self._waiting: Waiting | None = None
        self._thread: _InThread | None = None

    @property
    def is_ready(self) -> bool:
        return self._thread is None or self._thread.is_done

    @property
    def needs_rest(self) -> bool:
        """Whether no step may be under way when it goes on."""
        return self._start is not None or self._thread is not None

    def proceed(self, ring: Callable[[], None]) -> bool:
        """Up to its next wait; whether it has come to its end."""
        try:
            if self._start is not None:
                start, self._start = self._start, None
                self.result = start()
                if not isinstance(self.result, Generator):
                    return True
                self._waiting = self.result
                wanted = next(self._waiting)
            else:
                assert self._waiting is not None
                thread, self._thread = self._thread, None
                if thread is not None and thread.error is not None:
                    wanted = self._waiting.throw(thread.error)
                else:
                    wanted = self._waiting.send(None if thread is None else thread.result)
        except StopIteration as end:
            self.result = end.value
            return True
        if wanted is not None:
            self._thread = _InThread(wanted, ring)
        return False


class _InThread:
    """Something that is done beside the steps."""

    def __init__(self, function: Callable[[], Any], ring: Callable[[], None]) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        self.is_done = False
        self._function, self._ring = function, ring
        threading.Thread(target=self._run, name="ostinato-control", daemon=True).start()

    def _run(self) -> None:
        try:
            self.result = self._function()
        except Exception as error:
            self.error = error
        self.is_done = True
        self._ring()


def _fault_of(error: Exception) -> Fault:
    match error:
        case EngineAsleepError():
            return Fault.STATE
        case MemoryError() | torch.OutOfMemoryError():
            return Fault.MEMORY
        case TimeoutError():
            return Fault.TIME
        case OstinatoError() | ModelError() | OSError():
            return Fault.CALLER
    return Fault.ENGINE


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
