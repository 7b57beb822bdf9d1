"""The engine for the HTTP process: requests out, news to whoever asked, and what happens when it dies."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

from ostinato.engine.sampling_params import SamplingParams

from ..wire.messages import (
    Abort,
    Call,
    Embed,
    Event,
    Failed,
    Generate,
    Loading,
    News,
    Ready,
    Reply,
    Statistics,
    StepNews,
    Stop,
)
from .connection import EngineConnection

logger = logging.getLogger("ostinato.server")

LAST_WORDS = 0.05
"""Seconds between the death of the process and its announcement: what it said last is read meanwhile."""


class EngineState(StrEnum):
    """Where the engine process is in its life."""

    LOADING = "loading"
    READY = "ready"
    DEAD = "dead"


class EngineGone(Exception):
    """The engine process ended under a request, or is not there to take one."""


class EngineCallError(Exception):
    """The engine could not do what an admin endpoint asked."""


class Listener(Protocol):
    """Whoever waits for the news of one engine request."""

    def take_token(self, token: int) -> None:
        """The next token, and nothing else."""

    def take_in(self, news: News) -> None:
        """Something new; the last one has a finish reason."""

    def fail(self, error: EngineGone) -> None:
        """Nothing more will come."""


class EngineClient:
    """Talks to the engine process from one event loop, through as many lives as it has."""

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        restart: bool,
        on_ready: Callable[[Ready], None],
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_ready` is called with every engine that has started, `on_step` behind the news of a step."""
        self.state = EngineState.LOADING
        self.progress = "starting"
        """How far the start is, for people."""
        self.ready: Ready | None = None
        """Of the engine that serves, or of the last one."""
        self.statistics: Statistics | None = None
        """The last counters of the engine that serves."""
        self.restarts = 0
        self._options = options
        self._restart = restart
        self._on_ready = on_ready
        self._on_step = on_step
        self._connection: EngineConnection | None = None
        self._listeners: dict[int, Listener] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count()
        self._last_words: str | None = None
        self._stopping = False

    @property
    def num_unfinished(self) -> int:
        """Engine requests whose end has not come yet."""
        return len(self._listeners)

    # -- its life ----------------------------------------------------------------------------------

    async def run(self) -> str | None:
        """Keep an engine until `stop`: None; or until it dies and is not to be restarted: what happened."""
        while True:
            self._connection = EngineConnection(self._options, self._on_event)
            code = await self._connection.ended()
            if self._stopping:
                await self._connection.close()
                return None
            await asyncio.sleep(LAST_WORDS)
            was_ready = self.state is EngineState.READY
            what = self._bury(code)
            await self._connection.close()
            # One that never got ready would not get ready the next time either.
            if not (self._restart and was_ready):
                return what
            self.restarts += 1
            self.state, self.progress = EngineState.LOADING, "starting again"
            _say(f"{what}; starting it again")

    async def stop(self) -> None:
        """Tell the engine to leave; `run` returns when it has."""
        self._stopping = True
        if self._connection is not None:
            self._connection.send(Stop())
            if self.state is not EngineState.READY:  # it reads no commands while it loads
                self._connection.process.kill()

    def _bury(self, code: int | None) -> str:
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        what = f"the engine process ended ({self._last_words or how})"
        self.state, self.statistics, self._last_words = EngineState.DEAD, None, None
        self.fail_all(what)
        return what

    def fail_all(self, what: str) -> None:
        """Tell everybody who waits that nothing more will come."""
        listeners, self._listeners = self._listeners, {}
        calls, self._calls = self._calls, {}
        for listener in listeners.values():
            listener.fail(EngineGone(what))
        for future in calls.values():
            if not future.done():
                future.set_exception(EngineGone(what))

    # -- asking ------------------------------------------------------------------------------------

    def generate(
        self, prompt_ids: list[int], params: SamplingParams, listener: Listener, cache_salt: str | None = None
    ) -> int:
        """Ask for one completion; its id."""
        id = self._listen(listener)
        self._living().send(Generate(id, prompt_ids, params, cache_salt))
        return id

    def embed(self, prompt_ids: list[int], pooling: str, listener: Listener) -> int:
        """Ask for one vector; its id."""
        id = self._listen(listener)
        self._living().send(Embed(id, prompt_ids, pooling))
        return id

    def forget(self, ids: Sequence[int]) -> None:
        """Abort requests; their listeners hear no more."""
        known = [id for id in ids if self._listeners.pop(id, None) is not None]
        if known and self.state is EngineState.READY:
            self._living().send(Abort(known))

    def abort(self, ids: Sequence[int]) -> None:
        """Abort requests; their listeners get the end as news."""
        if ids:
            self._living().send(Abort(list(ids), silent=False))

    async def call(self, action: str, argument: str = "") -> Any:
        """Have something done between two steps; its result."""
        number = next(self._ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        self._living().send(Call(number, action, argument))
        return await future

    def _listen(self, listener: Listener) -> int:
        self._living()
        id = next(self._ids)
        self._listeners[id] = listener
        return id

    def _living(self) -> EngineConnection:
        if self.state is not EngineState.READY or self._connection is None or self._stopping:
            raise EngineGone(f"the engine is {self.state}")
        return self._connection

    # -- hearing -----------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        match event:
            case StepNews(ids, tokens, news):
                for id, token in zip(ids, tokens, strict=True):
                    if (listener := self._listeners.get(id)) is not None:
                        listener.take_token(token)
                for each in news:
                    self._deliver(each)
                self._on_step()
            case Statistics():
                self.statistics = event
            case Reply():
                self._settle(event)
            case Loading(text):
                self.progress = text
                _say(text)
            case Ready():
                self.ready, self.state, self.progress = event, EngineState.READY, "ready"
                _say(event.summary)
                self._on_ready(event)
            case Failed(error):
                self._last_words = error

    def _deliver(self, news: News) -> None:
        listener = self._listeners.get(news.id)
        if listener is None:
            return  # forgotten while the news was on its way
        if news.finish_reason is not None:
            del self._listeners[news.id]
        listener.take_in(news)

    def _settle(self, reply: Reply) -> None:
        future = self._calls.pop(reply.call, None)
        if future is None or future.done():
            return
        if reply.error is None:
            future.set_result(json.loads(reply.result))
        else:
            future.set_exception(EngineCallError(reply.error))


def _say(text: str) -> None:
    print(f"ostinato: {text}", file=sys.stderr, flush=True)
