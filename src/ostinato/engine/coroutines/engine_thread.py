"""The thread that steps an engine and, between steps, does what coroutines and other threads ask for."""

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
"""How many attempts at a step may raise in a row before the engine is given up."""
_BETWEEN_STEPS = 0.02
"""Seconds after which a step runs although there are more commands: a caller that gets its answer may ask
again at once, and a handful of such callers would leave no time for steps."""
_Found = TypeVar("_Found")


class EngineThread:
    """Runs from its creation until `stop`."""

    def __init__(self, llm: LLM, inboxes: Inboxes) -> None:
        self._llm, self._inboxes = llm, inboxes
        self._turn = llm.engine.turn
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.is_closed = False
        """Whether nothing can be asked any more."""
        self._gate = threading.Lock()
        """Must be held to ask; after `is_closed` is set under it, nothing is asked any more."""
        self._thread = threading.Thread(target=self._serve, name="ostinato-engine", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether requests are served."""
        return not self.is_closed and self._thread.is_alive()

    def stop(self) -> None:
        """Stop the thread and wait for its end; requests under way end with RequestError."""
        with self._gate:
            if not self.is_closed:
                self._commands.put(None)
        self._thread.join()

    def do(self, command: Callable[[TextEngine], None]) -> None:
        """Have the thread run this between two steps. Raises RequestError if it has ended."""
        self._turn.check_process()
        with self._gate:
            if self.is_closed:
                raise RequestError("this AsyncLLM is closed")
            engine = self._llm.engine
            self._commands.put(lambda: command(engine))

    async def call(self, function: Callable[[TextEngine], _Found]) -> _Found:
        """Have the engine's thread run this between two steps; returns its result."""
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
        # Carry out what was asked meanwhile, so that callers waiting for it get an answer.
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                _carry_out(command)
        self._inboxes.tell_all(error)
        engine.profiler.close()

    def _step(self, engine: TextEngine) -> list[RequestOutput]:
        """Take a step. A step that raises has ended its requests; the next one reports that. If that raises
        too, and another, the engine has failed for good."""
        for attempt in range(_ATTEMPTS):
            try:
                return engine.step()
            except Exception:
                if attempt + 1 == _ATTEMPTS:
                    raise
                logger.exception("a step failed; the engine continues")
        raise AssertionError

    def _obey(self, *, wait: bool) -> bool:
        """Carry out what was asked since the last step, for as long as a step may wait. False when it is time
        to stop."""
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
    except Exception:  # a command that fails must not harm anyone else
        logger.exception("a command failed; the engine continues")
