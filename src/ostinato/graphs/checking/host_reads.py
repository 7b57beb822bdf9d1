"""What a step reads in Python that no replay reads again: clocks, Python's and NumPy's random numbers,
files. A capture takes these for constants without a word, so only watching the code finds them.

Note [Who calls]
Only what the user's own code calls counts: torch and other libraries look at clocks and files for purposes of
their own, such as a line of a log. Calls of C functions are seen by a profiler. NumPy's are of a kind that no
profiler sees, so its generators are compared after every line of the user's.
"""

import builtins
import os
import random
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

from ..blame import Blame, frame_line, is_users
from ..forbidden import Forbidden

_CLOCK = "reads the clock, and a replay would go on with the time of the capture: read it outside of the step"
_DRAW = "draws a number in Python, and a replay would repeat that of the capture: draw with torch"
_FILE = (
    "reads a file, which a replay does not: read it before the capture, and keep what it holds in a tensor"
)

_CLOCKS = {
    each
    for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time", "localtime", "gmtime")
    for each in (getattr(time, name), getattr(time, f"{name}_ns", None))
    if each is not None
}
_DATES = ("now", "utcnow", "today")


def _codes(*functions: Any) -> set[CodeType]:
    return {code for function in functions if (code := getattr(function, "__code__", None)) is not None}


_OF_FILES = _codes(Path.open, Path.read_text, Path.read_bytes, torch.load, np.load, np.loadtxt, np.genfromtxt)


class HostReads:
    """Reports such reads in its context, which runs as usual."""

    def __init__(self, report: Callable[[Forbidden, Blame], None]) -> None:
        """`report` is called with what was read and where."""
        self._report = report
        self._generators: dict[int, tuple[Any, Any]] = {}
        self._last: tuple[FrameType, int] | None = None

    def __enter__(self) -> "HostReads":
        self._before = sys.getprofile(), sys.gettrace()
        self._generators = {0: (np.random, _state(np.random))}
        sys.settrace(self._enter_frame)
        sys.setprofile(self._see_call)
        return self

    def __exit__(self, *error: object) -> None:
        profile, trace = self._before
        sys.setprofile(profile)
        sys.settrace(trace)
        self._compare()
        self._generators.clear()
        self._last = None

    def _see_call(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and is_users(frame):
            found = _of_builtin(called)
        elif event == "call" and frame.f_back is not None and is_users(frame.f_back):
            found, frame = _of_function(frame), frame.f_back
        else:
            return
        if found is not None:
            self._report(found, Blame(frame_line(frame, frame.f_lineno)))

    # -- NumPy -------------------------------------------------------------------------------------

    def _enter_frame(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if not is_users(frame):
            return None
        self._meet_generators(frame)
        return self._see_line

    def _see_line(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        self._compare()
        self._last = frame, frame.f_lineno
        return self._see_line

    def _meet_generators(self, frame: FrameType) -> None:
        names = frame.f_code.co_names
        near = [*frame.f_locals.values(), *(frame.f_globals.get(name) for name in names)]
        for value in [*near, *(each for owner in near for each in _attributes(owner))]:
            if isinstance(value, np.random.Generator | np.random.RandomState):
                self._generators.setdefault(id(value), (value, _state(value)))

    def _compare(self) -> None:
        """Report the generators that the last line has drawn from."""
        for key, (generator, then) in self._generators.items():
            now = _state(generator)
            if now != then:
                self._generators[key] = generator, now
                if self._last is not None:
                    found = Forbidden("NumPy's random numbers", _DRAW)
                    self._report(found, Blame(frame_line(*self._last)))


def _of_builtin(called: Any) -> Forbidden | None:
    """What a function written in C reads."""
    owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
    if isinstance(owner, type) and issubclass(owner, date) and name in _DATES:
        return Forbidden(f"{owner.__name__}.{name}", _CLOCK)
    if isinstance(owner, random.Random):
        return Forbidden(f"random.{name}", _DRAW)
    if called is builtins.open:
        return Forbidden("open", _FILE)
    if called is os.urandom:
        return Forbidden("os.urandom", _DRAW)
    is_clock = getattr(called, "__module__", None) == "time" and called in _CLOCKS
    return Forbidden(f"time.{name}", _CLOCK) if is_clock else None


def _of_function(frame: FrameType) -> Forbidden | None:
    """What a function written in Python reads, of which this is the frame."""
    code, called = frame.f_code, frame.f_code.co_name
    if code.co_filename == random.__file__ and called != "__init__":
        return Forbidden(f"random.{called}", _DRAW)
    if code in _OF_FILES:
        return Forbidden(called, _FILE)
    return None


def _attributes(owner: Any) -> list[Any]:
    return list(vars(owner).values()) if isinstance(getattr(owner, "__dict__", None), dict) else []


def _state(generator: Any) -> Any:
    """Equal as long as nothing is drawn."""
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    kind, numbers, *rest = generator.get_state()
    return kind, numbers.tobytes(), rest
