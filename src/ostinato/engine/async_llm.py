"""`AsyncLLM`: the same engine for asyncio. One thread steps it; coroutines add, await and abort."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from ostinato.graphs import Report
from ostinato.memory import SaverError

from .llm import LLM
from .outputs import RequestOutput
from .sampling_params import RequestError, SamplingParams
from .sleeping.sleeper import SleepReport
from .text_engine import Prompt, TextEngine

_T = TypeVar("_T")
_News = RequestOutput | BaseException
_Inbox = asyncio.Queue[_News]


class AsyncLLM:
    """A model that serves many coroutines at once. Use it from one or more event loops."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        """As `LLM`."""
        self._llm = LLM(model, **options)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[str, tuple[asyncio.AbstractEventLoop, _Inbox]] = {}
        """By request: the inbox that gets its outputs, and the loop in which it may be touched."""
        self._names: dict[_Inbox, str] = {}
        """The request of each inbox; a name may belong to another by the time an inbox is given up."""
        self._closed = False
        self._gate = threading.Lock()
        """Whoever holds it may ask; nothing is asked any more once `_closed` is set under it."""
        self._thread = threading.Thread(target=self._serve, name="ostinato-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """The request's output as it grows, ending with the finished one.

        Leaving the loop early, or cancelling the task, aborts the request. RequestError if it is refused or
        fails.
        """
        loop = asyncio.get_running_loop()
        arrived: _Inbox = asyncio.Queue()
        params = sampling_params or self._llm.get_default_sampling_params()
        name: asyncio.Future[str] = loop.create_future()
        self._do(lambda engine: self._add(engine, prompt, params, request_id, loop, arrived, name))
        try:
            await name
            while True:
                news = await arrived.get()
                if isinstance(news, BaseException):
                    raise news
                if news.error is not None:
                    raise RequestError(news.error)
                yield news
                if news.finished:
                    return
        finally:
            with contextlib.suppress(RequestError):  # closed meanwhile: nothing is left to abort
                self._do(lambda engine: self._give_up(engine, arrived))

    async def abort(self, request_id: str) -> None:
        """End a request now; its coroutine gets the output as far as it got."""

        def abort(engine: TextEngine) -> None:
            output = engine.abort(request_id)
            if output is not None:
                self._tell(engine, [output])

        self._do(abort)

    def pause(self) -> None:
        """Run no further step until `resume`; requests keep their place, and new ones are taken in."""
        self._do(lambda engine: engine.core.scheduler.pause())

    def resume(self) -> None:
        """Go on after `pause`."""
        self._do(lambda engine: engine.core.scheduler.resume())

    async def sleep(self, level: int = 1, mode: str = "abort") -> SleepReport:
        """As `LLM.sleep`; requests that are kept, and those that come meanwhile, wait for `wake_up`."""
        return await self._asked(
            lambda engine: engine.sleep(level, mode, lambda new: self._tell(engine, new))
        )

    async def wake_up(self, tags: Sequence[str] | None = None) -> SleepReport:
        """As `LLM.wake_up`."""
        return await self._asked(lambda engine: engine.wake_up(tags))

    async def is_sleeping(self) -> bool:
        """As `LLM.is_sleeping`."""
        return await self._asked(lambda engine: engine.core.sleeper.is_sleeping)

    async def _asked(self, ask: Callable[[TextEngine], _T]) -> _T:
        """What the engine answers, between two steps."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_T] = loop.create_future()

        def command(engine: TextEngine) -> None:
            try:
                found: _T | Exception = ask(engine)
            except (RequestError, SaverError) as error:
                found = error
            _call(loop, _settle, answer, found)

        self._do(command)
        return await answer

    def graph_report(self) -> Report:
        """As `LLM.graph_report`."""
        return self._llm.graph_report()

    def close(self) -> None:
        """Stop serving and free everything; requests under way end with RequestError."""
        with self._gate:
            if not self._closed:
                self._commands.put(None)
        self._thread.join()
        self._llm.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # -- in the engine's thread --------------------------------------------------------------------

    def _do(self, command: Callable[[TextEngine], None]) -> None:
        with self._gate:
            if self._closed:
                raise RequestError("this AsyncLLM is closed")
            engine = self._llm.engine
            self._commands.put(lambda: command(engine))

    def _serve(self) -> None:
        engine = self._llm.engine
        try:
            while self._obey(wait=not engine.core.can_step):
                if engine.core.can_step:
                    self._tell(engine, engine.step())
            error: BaseException = RequestError("the engine was closed")
        except BaseException as problem:
            error = problem
        with self._gate:
            self._closed = True
        # What was asked in between is carried out, so that whoever waits for it is told.
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command()
        for loop, arrived in self._listeners.values():
            _call(loop, arrived.put_nowait, error)

    def _obey(self, *, wait: bool) -> bool:
        """Carry out what was asked since the last step; False when it is time to stop."""
        while wait or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            command()
            wait = False
        return True

    def _add(
        self,
        engine: TextEngine,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None,
        loop: asyncio.AbstractEventLoop,
        arrived: _Inbox,
        name: asyncio.Future[str],
    ) -> None:
        try:
            served = engine.add(prompt, params, request_id).request_id
        except RequestError as error:
            _call(loop, _settle, name, error)
            return
        self._listeners[served] = loop, arrived
        self._names[arrived] = served
        if not _call(loop, _settle, name, served):
            self._give_up(engine, arrived)

    def _give_up(self, engine: TextEngine, arrived: _Inbox) -> None:
        """Nobody reads from this inbox any more: its request ends, if it has not."""
        name = self._names.pop(arrived, None)
        if name is None:
            return  # it was refused
        _, listening = self._listeners.get(name, (None, None))
        if listening is arrived:
            del self._listeners[name]
            engine.abort(name)

    def _tell(self, engine: TextEngine, outputs: list[RequestOutput]) -> None:
        # Waking a loop costs more than all the rest, so it is done once for all that it gets.
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Inbox, RequestOutput]]] = {}
        for output in outputs:
            found = self._listeners.get(output.request_id)
            if found is not None:
                loop, arrived = found
                # The engine goes on writing to its own; a reader gets one that stays as it is.
                by_loop.setdefault(loop, []).append((arrived, output.snapshot()))
        for loop, letters in by_loop.items():
            if not _call(loop, _put, letters):
                gone = [arrived for other, arrived in self._listeners.values() if other is loop]
                for arrived in gone:
                    self._give_up(engine, arrived)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> bool:
    """Have a loop call this; False if it is closed, as `asyncio.run` leaves it: nobody waits in it."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True


def _put(letters: list[tuple[_Inbox, RequestOutput]]) -> None:
    for arrived, output in letters:
        arrived.put_nowait(output)


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if future.cancelled():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
