"""What must not be destroyed while a stream captures waits until the recording is over.

The garbage collector chooses its moments freely. A graph that is destroyed invalidates the capture in
progress. Pinned memory does harm later: when it is freed, torch records an event on every stream that has
copied from it; on one that captures, the event becomes part of the capture, and whoever asks for pinned
memory next, `.item()` for instance, is told "CUDA error: invalid argument".
"""

from collections.abc import Iterator
from contextlib import contextmanager

_recordings = 0
_waiting: list[object] = []


@contextmanager
def burials_postponed() -> Iterator[None]:
    """While recording."""
    global _recordings
    _recordings += 1
    try:
        yield
    finally:
        _recordings -= 1
        if not _recordings:
            _waiting.clear()


def bury_later(thing: object) -> None:
    """Keep what is about to be destroyed, if a recording goes on: for a `__del__`."""
    if _recordings:
        _waiting.append(thing)
