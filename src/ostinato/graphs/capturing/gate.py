"""Captures happen only inside `capture_gate()`, one at a time per process."""

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import CaptureError

_ALWAYS_FROZEN = 5_000 if sys.version_info >= (3, 12) else 0
"""Since Python 3.12 a collection moves a few hundred immortal objects to where `gc.freeze` puts its own."""


class _ThreadState(threading.local):
    open = False
    recording = False


_state = _ThreadState()

turn = threading.RLock()
"""Held during captures, trial runs and replays. Recordings share the device's stream and the process's random
generators and hooks: what another thread does with graphs meanwhile would end up in them."""


def require_open_gate() -> None:
    """Raise CaptureError unless this thread may capture now."""
    if _state.recording:
        raise CaptureError("capture inside capture: a graph is being recorded on this thread already")
    if not _state.open:
        raise CaptureError("capture outside the gate: wrap it in `with capture_gate():` or call capture()")


def is_recording() -> bool:
    """Whether this thread is recording a graph now."""
    return _state.recording


@contextmanager
def capture_gate() -> Iterator[None]:
    """A context that allows captures. Serving code never enters it, so serving never captures."""
    if _state.recording:
        raise CaptureError("capture inside capture: a graph is being recorded on this thread already")
    before, _state.open = _state.open, True
    try:
        yield
    finally:
        _state.open = before


@contextmanager
def recording() -> Iterator[None]:
    """Mark this thread as recording. CaptureError outside of the gate or during another recording."""
    require_open_gate()
    with turn:
        _state.recording = True
        try:
            yield
        finally:
            _state.recording = False


class _FrozenGc:
    """The garbage collector of the process: the first user freezes it, the last one thaws it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._was_enabled = self._ours = False

    def freeze(self, *, collects: bool) -> None:
        with self._lock:
            if self._holders == 0:
                self._was_enabled = gc.isenabled()
                if collects:
                    gc.collect()
                gc.disable()
                self._ours = gc.get_freeze_count() <= _ALWAYS_FROZEN
                if self._ours:
                    gc.freeze()
            self._holders += 1

    def thaw(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                if self._ours:
                    gc.unfreeze()
                if self._was_enabled:
                    gc.enable()


_frozen_gc = _FrozenGc()


@contextmanager
def frozen_gc(enabled: bool = True, *, collects: bool = True) -> Iterator[None]:
    """A context that collects garbage once, then keeps the collector from running or scanning old objects.

    A collection during a capture is slow and may free device memory that a graph still uses. A `gc.freeze()`
    of the user's stays in place, because unfreezing would undo it. Nested uses, also in other threads, have
    no effect. Without `collects` what is garbage already stays until later: where nothing of it can hold
    memory of the device.
    """
    if not enabled:
        yield
        return
    _frozen_gc.freeze(collects=collects)
    try:
        yield
    finally:
        _frozen_gc.thaw()
