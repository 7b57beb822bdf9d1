"""The thread that steps an engine, and does between two steps what coroutines and other threads ask for."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from ..outputs import RequestOutput
from ..parameters.sampling_params import RequestError
from ..text_engine import TextEngine
from .event_loop import call_in, settle
from .inboxes import Inboxes

if TYPE_CHECKING:
    from ..llm import LLM

logger = logging.getLogger("ostinato.engine")

_ATTEMPTS = 3
"""So many steps in a row may raise before an engine is given up."""
_BETWEEN_STEPS = 0.02
"""Seconds after which a step is taken though there is more to do: who is told may ask again at once, and a
handful of such callers would leave no step to anybody."""
_Found = TypeVar("_Found")


class EngineThread:
    """Runs from the beginning until `stop`."""

    def __init__(self, llm: LLM, inboxes: Inboxes) -> None:
        self._llm, self._inboxes = llm, inboxes
        self._turn = llm.engine.turn
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.is_closed = False
        """Whether nothing can be asked any more."""
        self._gate = threading.Lock()
        """Whoever holds it may ask; nothing is asked any more once `is_closed` is set under it."""
        self._thread = threading.Thread(target=self._serve, name="ostinato-engine", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether requests are served."""
        return not self.is_closed and self._thread.is_alive()

    def stop(self) -> None:
        """End it, and wait for that; requests under way end with RequestError."""
        with self._gate:
            if not self.is_closed:
                self._commands.put(None)
        self._thread.join()

    def do(self, command: Callable[[TextEngine], None]) -> None:
        """Have the thread do this between two steps. RequestError: it has ended."""
        self._turn.check_process()
        with self._gate:
            if self.is_closed:
                raise RequestError("this AsyncLLM is closed")
            engine = self._llm.engine
            self._commands.put(lambda: command(engine))

    async def call(self, function: Callable[[TextEngine], _Found]) -> _Found:
        """Have the engine's thread do this between two steps; what comes of it."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Found] = loop.create_future()

        def call(engine: TextEngine) -> None:
            try:
                found = function(engine)
            except Exception as error:
                call_in(loop, settle, answer, error)
            else:
                call_in(loop, settle, answer, found)

        self.do(call)
        return await answer

    def _serve(self) -> None:
        engine = self._llm.engine
        try:
            while self._obey(wait=not engine.core.can_step):
                if engine.core.can_step:
                    self._inboxes.tell(engine, self._step(engine))
            error: BaseException = RequestError("the engine was closed")
        except BaseException as problem:
            error = problem
        with self._gate:
            self.is_closed = True
        # What was asked in between is carried out, so that whoever waits for it is told.
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                _carry_out(command)
        self._inboxes.tell_all(error)
        engine.profiler.close()

    def _step(self, engine: TextEngine) -> list[RequestOutput]:
        """A step that raises has ended its requests, who are told by the next one. If that raises as well,
        and another, nothing works any more."""
        for attempt in range(_ATTEMPTS):
            try:
                return engine.step()
            except Exception:
                if attempt + 1 == _ATTEMPTS:
                    raise
                logger.exception("a step failed; the engine goes on")
        raise AssertionError

    def _obey(self, *, wait: bool) -> bool:
        """Carry out what was asked since the last step, if it takes no longer than a step may wait; False
        when it is time to stop."""
        end: float | None = None
        while wait or not self._commands.empty():
            if end is not None and perf_counter() >= end:
                break
            command = self._commands.get()
            end = end or perf_counter() + _BETWEEN_STEPS
            if command is None:
                return False
            _carry_out(command)
            wait = False
        return True


def _carry_out(command: Callable[[], None]) -> None:
    try:
        command()
    except Exception:  # one that cannot be carried out is nobody else's loss
        logger.exception("a command failed; the engine goes on")
