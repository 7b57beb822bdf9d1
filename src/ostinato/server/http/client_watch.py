"""Notices that the client of a request has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from starlette.types import Receive


class ClientWatch:
    """Calls `on_gone` if the client closes its connection before the watch is left."""

    def __init__(self, receive: Receive, on_gone: Callable[[], None]) -> None:
        """`receive` must have given out the whole body."""
        self._receive = receive
        self._on_gone = on_gone
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ClientWatch:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._on_gone()
