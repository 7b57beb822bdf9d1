"""The thread that steps an engine and, between steps, does what coroutines and other threads ask for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from ..delivery.output_stream import OutputStream
from ..outputs import RequestOutput
from ..parameters.sampling_params import RequestError, SamplingParams
from ..scheduling.drain import Announced
from ..text_engine import TextEngine

if TYPE_CHECKING:
    from ..llm import LLM


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> bool:
    """Have a loop call this; False if it is closed, as after `asyncio.run`: nobody waits in it any more."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True


def settle(future: asyncio.Future[Any], result: Any) -> None:
    """Set a future's result or exception; it may have been cancelled."""
    if future.cancelled():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


News = RequestOutput | BaseException
Inbox = asyncio.Queue[News]


class Inboxes:
    """The inboxes of one engine."""

    def __init__(self) -> None:
        self.listeners: dict[str, tuple[asyncio.AbstractEventLoop, Inbox]] = {}
        """By request: the inbox that gets its outputs, and the loop in which it may be touched."""
        self.names: dict[Inbox, str] = {}
        """The request of each inbox; by the time an inbox is given up, another may have the name."""
        self.streams: dict[Inbox, OutputStream] = {}
        """Which part of its outputs each inbox gets."""
        self._announced: dict[Inbox, Announced] = {}
        """Those whose adapters are being read."""

    def announce(self, engine: TextEngine, arrived: Inbox) -> None:
        """Note that the adapter of its request is now being read."""
        self._announced[arrived] = engine.core.scheduler.arrivals.announce()

    def arrival(self, engine: TextEngine, arrived: Inbox) -> contextlib.AbstractContextManager[None]:
        """A request added inside counts as arrived when its adapter began to be read."""
        return engine.core.scheduler.arrivals.arrival(self._announced.pop(arrived, None))

    def listen(self, name: str, loop: asyncio.AbstractEventLoop, arrived: Inbox) -> None:
        """Send outputs of this request there from now on."""
        self.listeners[name] = loop, arrived
        self.names[arrived] = name

    def add(
        self,
        engine: TextEngine,
        add: Callable[[TextEngine], str],
        params: SamplingParams,
        loop: asyncio.AbstractEventLoop,
        arrived: Inbox,
        name: asyncio.Future[str],
    ) -> None:
        """Add a request whose outputs go to this inbox; `name` gets its id, or why it was refused."""
        try:
            served = add(engine)
        except Exception as error:  # caused by whatever the caller passed, so it goes to the caller
            call_in(loop, settle, name, error)
            return
        self.listen(served, loop, arrived)
        self.streams[arrived] = OutputStream(params)
        if not call_in(loop, settle, name, served):
            self.give_up(engine, arrived)

    def give_up(self, engine: TextEngine, arrived: Inbox) -> None:
        """Nobody reads from this inbox any more: end its request, if it has not ended."""
        self.streams.pop(arrived, None)
        if (announced := self._announced.pop(arrived, None)) is not None:
            engine.core.scheduler.arrivals.withdraw(announced)
        name = self.names.pop(arrived, None)
        if name is None:
            return  # it was refused
        _, listening = self.listeners.get(name, (None, None))
        if listening is arrived:
            del self.listeners[name]
            engine.abort(name)

    def tell(self, engine: TextEngine, outputs: list[RequestOutput]) -> None:
        """Send outputs that grew or ended to the inboxes that wait for them."""
        # Waking a loop costs more than all the rest, so each loop is woken once for all its outputs.
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Inbox, RequestOutput]]] = {}
        for output in outputs:
            found = self.listeners.get(output.request_id)
            if found is not None:
                loop, arrived = found
                # The engine continues to write to its own object; a reader gets a copy that does not change.
                stream = self.streams.get(arrived)
                news = output.snapshot() if stream is None else stream.news(output)
                if news is not None:
                    by_loop.setdefault(loop, []).append((arrived, news))
        for loop, letters in by_loop.items():
            if not call_in(loop, _put, letters):
                gone = [arrived for other, arrived in self.listeners.values() if other is loop]
                for arrived in gone:
                    self.give_up(engine, arrived)

    def tell_all(self, error: BaseException) -> None:
        """Send this error to all: nothing more comes."""
        for loop, arrived in self.listeners.values():
            call_in(loop, arrived.put_nowait, error)


def _put(letters: list[tuple[Inbox, RequestOutput]]) -> None:
    for arrived, output in letters:
        arrived.put_nowait(output)


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
