"""Which inbox, in which event loop, waits for the outputs of which request.

Only the engine's thread touches these records.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from ..delivery.output_stream import OutputStream
from ..outputs import RequestOutput
from ..parameters.sampling_params import SamplingParams
from ..scheduling.drain import Announced
from ..text_engine import TextEngine
from .event_loop import call_in, settle

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
