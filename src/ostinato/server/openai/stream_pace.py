"""When streams write: in rounds, with pauses between them that grow with the work of a round."""

from __future__ import annotations

import asyncio
from time import thread_time

PAUSE = 2.0
"""Times the CPU time of a round: streams have a third of the event loop, requests and news the rest."""
SHORTEST = 0.001
"""Seconds; a shorter pause is none, so that a few streams get every token by itself."""
LONGEST = 0.02
"""Seconds; above it people begin to see that text comes in pieces."""


class StreamPace:
    """Wakes the readers of streams that have got tokens.

    A chunk costs many times what a token costs. With many streams, a chunk for each token of each would fill
    the event loop, and new requests would wait behind chunks while the engine has room for them.
    """

    def __init__(self) -> None:
        self._due: set[asyncio.Event] = set()
        self._is_waiting = False
        self._began = 0.0

    def wake(self, reader: asyncio.Event) -> None:
        """Set `reader` in the next round."""
        self._due.add(reader)
        if not self._is_waiting:
            self._is_waiting = True
            # Behind the rest of the step's news, so that a round has all of it.
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        self._began = thread_time()
        due, self._due = self._due, set()
        for reader in due:
            reader.set()
        # Readers write in the next turn of the loop, and sockets take it at the end of that turn.
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._pause)

    def _pause(self) -> None:
        seconds = min(PAUSE * (thread_time() - self._began), LONGEST)
        loop = asyncio.get_running_loop()
        if seconds >= SHORTEST:
            loop.call_later(seconds, self._next)
        else:
            self._next()

    def _next(self) -> None:
        if self._due:
            self._round()
        else:
            self._is_waiting = False
