"""The engine for the HTTP process: requests out, news to whoever asked, and what happens when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from ostinato.engine.parameters.sampling_params import SamplingParams

from ..log_lines import announce
from ..tenants.tenant import NOBODY, Tenant
from ..wire.messages import (
    Abort,
    AdapterInfo,
    Beat,
    Call,
    Embed,
    Event,
    Failed,
    Fault,
    Generate,
    Loading,
    News,
    Ready,
    Reply,
    Standing,
    Statistics,
    StepNews,
    Stop,
    packed,
)
from .connection import EngineConnection

logger = logging.getLogger("ostinato.server")

LAST_WORDS = 0.05
"""Seconds between the death of the process and its announcement: what it said last is read meanwhile."""


WATCH_SECONDS = 0.25
"""Between two looks at whether the engine lives."""
DYING_SECONDS = 10.0
"""A killed process that is still there after these will not go: its device holds it."""
STOP_SECONDS = 0.5
"""That an engine which is told to leave has for it."""
SETTLED_SECONDS = 60.0
"""An engine that has served so long died of something new."""
LONGEST_PAUSE = 30.0
GPU_STEP_SECONDS, CPU_STEP_SECONDS = 120.0, 900.0
"""That a step may take where nothing is said: a kernel may be compiled in it, or a long prompt read."""


class EngineState(StrEnum):
    """Where the engine process is in its life."""

    LOADING = "loading"
    READY = "ready"
    DEAD = "dead"


@dataclass(frozen=True)
class EngineLimits:
    """When an engine counts as hung, and how often a new one is tried."""

    heartbeat_timeout: float
    step_timeout: float | None
    max_restarts: int | None
    """In a row; None: it is not started again."""


class EngineGone(Exception):
    """The engine process ended under a request, or is not there to take one."""


class EngineCallError(Exception):
    """The engine could not do what an admin endpoint asked."""

    def __init__(self, message: str, fault: Fault) -> None:
        super().__init__(message)
        self.fault = fault


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
        limits: EngineLimits,
        on_ready: Callable[[Ready], None],
        on_step: Callable[[], None] = lambda: None,
        adapters: Callable[[], Sequence[AdapterInfo] | None] = lambda: None,
    ) -> None:
        """`on_ready` is called with every engine that has started, `on_step` behind the news of a step.
        `adapters`: what an engine begins with, in place of those of `options`; None: those."""
        self.state = EngineState.LOADING
        self.progress = "starting"
        """How far the start is, for people."""
        self.ready: Ready | None = None
        """Of the engine that serves, or of the last one."""
        self.statistics: Statistics | None = None
        """The last counters of the engine that serves."""
        self.standing = Standing()
        """What its controls have made of it."""
        self.restarts = 0
        self._options = options
        self._limits = limits
        self._on_ready = on_ready
        self._on_step = on_step
        self._adapters = adapters
        self._connection: EngineConnection | None = None
        self._listeners: dict[int, Listener] = {}
        self._tenants: dict[int, Tenant] = {}
        """Of the same requests."""
        self._present: dict[Tenant, None] = {}
        """Tenants with unfinished requests."""
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next_id = 0
        self._last_words: str | None = None
        self._stopping = False
        self._stop_asked = asyncio.Event()
        self._signs_of_life = 0
        self._step_seconds = 0.0
        self._ready_at: float | None = None
        """When the engine of now began to serve."""

    @property
    def num_unfinished(self) -> int:
        """Engine requests whose end has not come yet."""
        return len(self._listeners)

    def share_of(self, tenant: Tenant) -> float:
        """Returns the share of a tenant among those with unfinished requests and itself."""
        others = sum(other.weight for other in self._present if other is not tenant)
        return tenant.weight / (tenant.weight + others)

    # -- its life ----------------------------------------------------------------------------------

    async def run(self) -> str | None:
        """Keep an engine until `stop`: None; or until it dies and is not to be restarted: what happened."""
        in_a_row = 0
        while not self._stopping:
            self._connection = connection = EngineConnection(self._options, self._on_event, self._adapters())
            self._ready_at = None
            code = await self._watched(connection)
            if self._stopping:
                break
            await asyncio.sleep(LAST_WORDS)
            has_settled = self._ready_at is not None and time.monotonic() - self._ready_at > SETTLED_SECONDS
            what = self._bury(code)
            most = self._limits.max_restarts
            # One that never got ready would not get ready the next time either.
            if most is None or self.ready is None or connection.process.is_alive():
                return what
            await connection.close()
            in_a_row = 1 if has_settled else in_a_row + 1
            if in_a_row > most:
                return f"{what}, and {most} restarts in a row did not help"
            await self._pause(what, 0.0 if in_a_row == 1 else min(2.0 ** (in_a_row - 2), LONGEST_PAUSE))
        if self._connection is not None:
            await self._connection.close()
        return None

    def kill(self) -> None:
        """End the engine's process now."""
        if self._connection is not None:
            self._connection.process.kill()

    async def stop(self) -> None:
        """Tell the engine to leave, and make it; `run` returns when it has."""
        self._stopping = True
        self._stop_asked.set()
        if self._connection is not None:
            kill = self._connection.process.kill
            if self.state is EngineState.READY:
                self._connection.send(Stop())
                asyncio.get_running_loop().call_later(STOP_SECONDS, kill)
            else:  # it reads no commands while it loads
                kill()

    async def _pause(self, what: str, seconds: float) -> None:
        self.restarts += 1
        self.state = EngineState.LOADING
        self.progress = f"starting again in {seconds:g} s" if seconds else "starting again"
        announce(f"{what}; {self.progress}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop_asked.wait(), seconds)

    async def _watched(self, connection: EngineConnection) -> int | None:
        """Wait for the end of the process; its exit code. One that hangs is killed."""
        watch = asyncio.create_task(self._watch(connection))
        ended = asyncio.create_task(connection.ended())
        try:
            await asyncio.wait({watch, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await asyncio.wait({ended}, timeout=DYING_SECONDS)
            return await ended if ended.done() else None
        except Exception as error:  # in taking in what the engine said
            logger.exception("the engine's news cannot be taken in")
            self._last_words = str(error)
            return None
        finally:
            watch.cancel()
            ended.cancel()

    async def _watch(self, connection: EngineConnection) -> None:
        """Return when the engine hung: everybody is told, and it is killed."""
        silent, heard = 0.0, -1
        limits = self._limits
        while True:
            before = time.monotonic()
            await asyncio.sleep(WATCH_SECONDS)
            # If this process itself stood still, the engine's words of that time are yet to be read.
            elapsed = min(time.monotonic() - before, 2 * WATCH_SECONDS)
            silent = silent + elapsed if heard == self._signs_of_life else 0.0
            heard = self._signs_of_life
            if self.state is not EngineState.READY:
                continue
            if silent >= limits.heartbeat_timeout:
                why = f"gave no sign of life for {limits.heartbeat_timeout:g} s"
            elif self._step_seconds >= self._longest_step:
                why = f"was at one step for {self._longest_step:g} s"
            else:
                continue
            self._last_words = f"it {why} and was killed"
            self._bury_hung()
            connection.process.kill()
            return

    @property
    def _longest_step(self) -> float:
        if self._limits.step_timeout is not None:
            return self._limits.step_timeout
        device = "cpu" if self.statistics is None else self.statistics.device
        return CPU_STEP_SECONDS if device.startswith("cpu") else GPU_STEP_SECONDS

    def _bury_hung(self) -> None:
        """Say so at once: even a killed process may take its time to go."""
        self.state = EngineState.DEAD
        self.fail_all(f"the engine hung: {self._last_words}")

    def _bury(self, code: int | None) -> str:
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        what = f"the engine process ended ({self._last_words or how})"
        self._signs_of_life, self._step_seconds = 0, 0.0
        self.state, self.statistics, self._last_words = EngineState.DEAD, None, None
        self.fail_all(what)
        return what

    def fail_all(self, what: str) -> None:
        """Tell everybody who waits that nothing more will come."""
        listeners, self._listeners = self._listeners, {}
        for id in listeners:
            self._leave(id)
        calls, self._calls = self._calls, {}
        for listener in listeners.values():
            listener.fail(EngineGone(what))
        for future in calls.values():
            if not future.done():
                future.set_exception(EngineGone(what))

    # -- asking ------------------------------------------------------------------------------------

    def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        listeners: Sequence[Listener],
        cache_salt: str | None = None,
        adapter: str | None = None,
        tenant: Tenant = NOBODY,
    ) -> range:
        """Asks for completions of one prompt, one for each listener; returns their ids.

        They differ in their seeds alone, as `SamplingParams.seeded` counts.
        """
        connection = self._living()
        ids = range(self._next_id, self._next_id + len(listeners))
        self._next_id = ids.stop
        for id, listener in zip(ids, listeners, strict=True):
            self._enter(id, listener, tenant)
        whose = tenant.name, tenant.weight
        connection.send(Generate(ids.start, prompt_ids, params, cache_salt, adapter, len(ids), *whose))
        return ids

    def embed(
        self,
        prompt_ids: list[int],
        pooling: str,
        listener: Listener,
        adapter: str | None = None,
        cache_salt: str | None = None,
        tenant: Tenant = NOBODY,
    ) -> int:
        """Ask for one vector; its id."""
        connection, id = self._living(), self._new_id()
        self._enter(id, listener, tenant)
        whose = tenant.name, tenant.weight
        connection.send(Embed(id, prompt_ids, pooling, adapter, cache_salt, *whose))
        return id

    def _enter(self, id: int, listener: Listener, tenant: Tenant) -> None:
        self._listeners[id], self._tenants[id] = listener, tenant
        tenant.num_unfinished += 1
        self._present[tenant] = None

    def _leave(self, id: int) -> None:
        tenant = self._tenants.pop(id)
        tenant.num_unfinished -= 1
        if not tenant.num_unfinished:
            del self._present[tenant]

    def forget(self, ids: Sequence[int]) -> None:
        """Abort requests; their listeners hear no more."""
        known = [id for id in ids if self._listeners.pop(id, None) is not None]
        for id in known:
            self._leave(id)
        if known and self.state is EngineState.READY:
            self._living().send(Abort(known))

    def abort(self, ids: Sequence[int]) -> None:
        """Abort requests; their listeners get the end as news, from the engine or because it is gone."""
        if ids and self.state is EngineState.READY:
            self._living().send(Abort(list(ids), silent=False))

    async def call(self, name: str, **payload: Any) -> Any:
        """Have something done between two steps; its result. EngineCallError: it was refused, or failed.

        Nobody limits the time: a call may have to wait for requests, or for another process.
        """
        connection = self._living()
        try:
            arguments = packed(payload)
        except (OverflowError, UnicodeEncodeError) as error:  # JSON knows larger numbers and half characters
            raise EngineCallError(
                f"the arguments of {name} cannot be passed on: {error}", Fault.CALLER
            ) from None
        number = self._new_id()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        connection.send(Call(number, name, arguments))
        return await future

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _living(self) -> EngineConnection:
        if self.state is not EngineState.READY or self._connection is None or self._stopping:
            raise EngineGone(f"the engine is {self.state}")
        return self._connection

    # -- hearing -----------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        self._signs_of_life += 1
        match event:
            case StepNews(ids, tokens, news):
                for id, token in zip(ids, tokens, strict=True):
                    if (listener := self._listeners.get(id)) is not None:
                        listener.take_token(token)
                for each in news:
                    self._deliver(each)
                self._on_step()
            case Beat(seconds):
                self._step_seconds = seconds
            case Statistics():
                self.statistics = event
            case Standing():
                self.standing = event
            case Reply():
                self._settle(event)
            case Loading(text):
                self.progress = text
                announce(text)
            case Ready():
                self.ready, self.state, self.progress = event, EngineState.READY, "ready"
                self._ready_at = time.monotonic()
                announce(event.summary)
                self._on_ready(event)
            case Failed(error):
                self._last_words = error

    def _deliver(self, news: News) -> None:
        listener = self._listeners.get(news.id)
        if listener is None:
            return  # forgotten while the news was on its way
        if news.finish_reason is not None:
            del self._listeners[news.id]
            self._leave(news.id)
        listener.take_in(news)

    def _settle(self, reply: Reply) -> None:
        future = self._calls.pop(reply.call, None)
        if future is None or future.done():
            return
        if reply.error is None:
            future.set_result(json.loads(reply.result))
        else:
            future.set_exception(EngineCallError(reply.error, reply.fault))
