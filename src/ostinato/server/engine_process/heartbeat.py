"""Signs of life: told by a thread beside the engine's loop, with how long the loop has been at one thing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from ..wire.messages import Beat, encode

BEAT_SECONDS = 0.5


class Heartbeat:
    """Says every half second that the process runs and since when its loop has been at the same step.

    A process that is stopped says nothing; one whose device hangs says that its step takes longer and longer.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], event_address: str) -> None:
        self._context = context
        self._address = event_address
        self._busy_since: float | None = None

    def start(self) -> None:
        """Begin, in a thread that ends with the process."""
        threading.Thread(target=self._beat, name="ostinato-heartbeat", daemon=True).start()

    def at_work(self) -> None:
        """The loop begins something."""
        self._busy_since = time.monotonic()

    def at_rest(self) -> None:
        """The loop waits for something to do."""
        self._busy_since = None

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Around what is no step and takes as long as it takes."""
        self.at_rest()
        yield
        self.at_work()

    def _beat(self) -> None:
        events = self._context.socket(zmq.PUSH)
        events.setsockopt(zmq.SNDHWM, 4)
        events.setsockopt(zmq.LINGER, 0)
        events.connect(self._address)
        try:
            while True:
                since = self._busy_since
                seconds = 0.0 if since is None else time.monotonic() - since
                events.send(encode(Beat(seconds)))
                time.sleep(BEAT_SECONDS)
        except zmq.ZMQError:  # the process leaves
            events.close()
