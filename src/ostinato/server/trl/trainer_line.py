"""What a trainer was promised about its weights.

TRL's calls about weights are answered before they are carried out, since the trainer sends only then. So each
is checked, answered, and kept behind the answer, one after the other. Whoever generates waits until all of it
is kept, and a parameter is not taken while somebody generates: no rollout is of two kinds of weights. If one
was not kept, the trainer believes that weights are here which are not: everybody is refused until it begins
anew or leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from ..engine_client.client import EngineClient
from ..openai.errors import ApiError

EngineCall = Callable[..., Awaitable[Any]]


class TrainerLine:
    """To one trainer at a time. Used from one event loop."""

    def __init__(self, engine: EngineClient, call: EngineCall) -> None:
        """`call` has the engine do something, by name; an ApiError says why it does not."""
        self._engine, self._call = engine, call
        self._promised: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._problem: str | None = None
        self._number = 0
        """Of the trainer; what was promised to an earlier one is no concern of this one."""
        self._restarts: int | None = None
        """Of the engine when the trainer came."""
        self._one_by_one = asyncio.Lock()
        self._num_generating = 0
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()

    async def open(self, **meeting: Any) -> None:
        """Listen for a trainer, in the place of an earlier one."""
        await self._call("listen_for_trainer", **meeting)
        self._begin_anew()
        self._restarts = self._engine.restarts
        self._promise("meet_trainer", {})

    async def take(self, **parameter: Any) -> None:
        """Take a parameter that will be sent when this is answered."""
        async with self._one_by_one:
            await self.kept()
            number = self._number
            await self._call("check_parameter", **parameter)
            if number != self._number:
                raise ApiError(409, "another trainer has come, or this one has left")
            self._promise("receive_parameter", parameter)

    async def close(self) -> None:
        """Leave the trainer, if there is one; what was promised to it is given up."""
        self._begin_anew()
        await self._call("leave_trainer")

    def _begin_anew(self) -> None:
        self._number += 1
        self._promised, self._problem, self._restarts = None, None, None

    async def kept(self) -> None:
        """Wait for what was promised; 409 if it was not kept."""
        while (promised := self._promised) is not None and not promised.done():
            await asyncio.wait([promised])
        if self._restarts is not None and self._restarts != self._engine.restarts:
            self._problem = "the engine was started again, with the weights that it began with"
        if self._problem is not None:
            message = (
                f"the trainer's weights are not all here, /init_communicator/ begins anew: {self._problem}"
            )
            raise ApiError(409, message, code="weights_not_received")

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        """Generate inside, with all weights that were promised before and none that are later."""
        await self.kept()
        self._num_generating += 1
        self._is_quiet.clear()
        try:
            yield
        finally:
            self._num_generating -= 1
            if not self._num_generating:
                self._is_quiet.set()

    def _promise(self, name: str, payload: dict[str, Any]) -> None:
        self._promised = task = asyncio.create_task(self._keep(name, payload, self._number))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, name: str, payload: dict[str, Any], number: int) -> None:
        try:
            await self._is_quiet.wait()
            if number == self._number:
                await self._call(name, **payload)
        except Exception as error:
            if number == self._number:
                self._problem = str(error) or type(error).__name__
