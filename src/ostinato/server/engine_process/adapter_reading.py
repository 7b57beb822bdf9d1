"""Requests whose adapter had to make room on the host: it is read again beside the steps, then they queue."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from ostinato.engine.adapters.lora_request import LoRARequest
from ostinato.engine.adapters.served_adapters import ServedAdapters
from ostinato.models.adapters.adapter import Adapter

Then = Callable[[LoRARequest, Adapter | None], None]
"""Called between two steps with what was read; `ServedAdapters.version_of` takes both."""


class AdapterReading:
    """Reads one adapter at a time."""

    def __init__(self, adapters: ServedAdapters) -> None:
        self._adapters = adapters
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="ostinato-adapters")
        self._under_way: dict[str, Future[Adapter]] = {}
        """By path."""
        self._waiting: list[tuple[LoRARequest, str, Then]] = []

    @property
    def is_under_way(self) -> bool:
        """Whether `carry_on` will have something to do soon."""
        return bool(self._waiting)

    def when_there(self, asked: LoRARequest, then: Then) -> bool:
        """Call `then` as soon as nothing has to be read; whether that was at once."""
        path = self._adapters.path_to_read(asked)
        if path is None:
            then(asked, None)
            return True
        future = self._under_way.get(path)
        if future is None or future.done():
            self._under_way[path] = self._threads.submit(self._adapters.read, path)
        self._waiting.append((asked, path, then))
        return False

    def carry_on(self) -> None:
        """Go on with those whose adapters were read; between two steps. What could not be read is tried
        again by `version_of`, which says why."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for asked, path, then in waiting:
            future = self._under_way[path]
            if future.done():
                then(asked, None if future.exception() is not None else future.result())
            else:
                self._waiting.append((asked, path, then))
        done = [path for path, future in self._under_way.items() if future.done()]
        for path in done:
            del self._under_way[path]
