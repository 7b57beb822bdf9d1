"""A trainer's calls of an engine, as coroutines: the same as `TrainerServices`."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ..sleeping.served_weights import WeightsReport
from ..weight_sync.trainer_link import Operation, advanced
from .trainer_services import inside, worker_call
from .worker import WorkerModel

if TYPE_CHECKING:
    from ..coroutines.engine_thread import EngineThread
    from ..llm import LLM

_Found = TypeVar("_Found")


class AsyncTrainerServices:
    """For an engine that runs its steps in its own thread."""

    _llm: LLM
    _thread: EngineThread

    async def _operated(self, operation: Operation[_Found]) -> _Found:
        """Run an operation: its waits for a trainer in another thread, the rest in the engine's thread."""
        found: Any = None
        error: Exception | None = None
        while True:
            step = functools.partial(advanced, operation, found, error)
            is_over, wanted = await self._thread.call(lambda _, step=step: step())  # type: ignore[misc]
            if is_over:
                result: _Found = wanted
                return result
            found, error = None, None
            try:
                found = await asyncio.to_thread(wanted)
            except Exception as problem:
                error = problem

    async def init_weight_transfer_engine(self, request: object) -> None:
        """As `LLM.init_weight_transfer_engine`."""
        await self._operated(self._llm.trainer_link.init_transfer(inside(request, "init_info")))

    async def start_weight_update(self) -> None:
        """As `LLM.start_weight_update`."""
        self._llm.start_weight_update()

    async def finish_weight_update(self, weight_version: str | None = None) -> WeightsReport | None:
        """As `LLM.finish_weight_update`."""
        return await self._thread.call(lambda _: self._llm.finish_weight_update(weight_version))

    async def update_weight_version(self, new_version: str) -> None:
        """As `LLM.update_weight_version`."""
        await self._thread.call(lambda _: self._llm.update_weight_version(new_version))

    async def get_weight_version(self) -> str:
        """As `LLM.get_weight_version`."""
        return self._llm.get_weight_version()

    async def collective_rpc(
        self,
        method: str | Callable[..., _Found],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[_Found]:
        """As `LLM.collective_rpc`."""
        llm = self._llm
        call = worker_call(llm.worker, method, args, kwargs or {})
        return [await asyncio.wait_for(self._thread.call(lambda _: llm.between_steps(call)), timeout)]

    async def apply_model(self, func: Callable[[WorkerModel], _Found]) -> list[_Found]:
        """As `LLM.apply_model`."""
        return await self._thread.call(lambda _: self._llm.apply_model(func))
