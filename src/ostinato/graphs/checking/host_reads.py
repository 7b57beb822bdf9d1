"""What a step reads in Python that no replay reads again: clocks, Python's and NumPy's random numbers,
files. A capture takes these for constants without a word, so only watching the code finds them.

Note [Who calls]
Only what the user's own code calls counts: torch and other libraries look at clocks and files for purposes of
their own, such as a line of a log. Calls of C functions are seen by a profiler. NumPy's are of a kind that no
profiler sees, so its generators are compared after every line of the user's.

Note [Where a time goes]
A function that measures itself reads the clock and is right all the same, if the time goes nowhere but into
numbers that it leaves in Python. That is read from its source: local variables and attributes get the clock,
or sums and differences of it, and these variables are used for nothing else. Whether nobody looks at the
attributes is known elsewhere.
"""

import ast
import builtins
import functools
import inspect
import os
import random
import sys
import textwrap
import time
from collections.abc import Callable, Collection
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
        self.times: dict[str, frozenset[str]] = {}
        """Lines that read the clock, with the names of the attributes that alone get the time, see Note
        [Where a time goes]."""
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
            line = frame_line(frame, frame.f_lineno)
            if found.why is _CLOCK and (names := _fed_by_clock(frame.f_code).get(frame.f_lineno)):
                self.times[line] = names
            self._report(found, Blame(line))

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


@functools.cache
def _fed_by_clock(code: CodeType) -> dict[int, frozenset[str]]:
    """Returns the attributes and entries that get times which a function reads, by line; none if these times
    go elsewhere, too, or may, see Note [Where a time goes]."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return {}
    nodes = list(ast.walk(tree))
    simple = [
        each
        for each in nodes
        if isinstance(each, ast.Assign) and _is_arithmetic(each.value) and all(map(_name_of, each.targets))
    ]
    times: set[str] = set()
    timed: list[ast.Assign] = []
    while found := [each for each in simple if each not in timed and _has_time(each.value, times)]:
        timed += found
        times |= {target.id for each in found for target in each.targets if isinstance(target, ast.Name)}
    inside = {id(node) for each in timed for node in ast.walk(each.value)}
    shared = {name for each in nodes if isinstance(each, ast.Global | ast.Nonlocal) for name in each.names}
    if shared & times or any(_is_time(node, times) and id(node) not in inside for node in nodes):
        return {}
    targets = [target for each in timed for target in each.targets if not isinstance(target, ast.Name)]
    names = frozenset(filter(None, map(_name_of, targets)))
    first = code.co_firstlineno - 1
    return {first + line: names for each in timed for line in range(each.lineno, (each.end_lineno or 0) + 1)}


def _name_of(target: ast.expr) -> str | None:
    """Returns the name of a variable, an attribute or an entry that is assigned."""
    if isinstance(target, ast.Subscript):
        key = target.slice
        return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None
    return getattr(target, "attr", None) or getattr(target, "id", None)


_CLOCK_NAMES = frozenset(clock.__name__ for clock in _CLOCKS)


def _is_arithmetic(node: ast.expr) -> bool:
    """Returns whether it is made of variables, constants and the clock, and decides nothing."""
    if isinstance(node, ast.BinOp):
        return _is_arithmetic(node.left) and _is_arithmetic(node.right)
    return isinstance(node, ast.Name | ast.Attribute | ast.Constant) or _is_time(node, ())


def _has_time(node: ast.expr, times: Collection[str]) -> bool:
    return any(_is_time(inner, times) for inner in ast.walk(node))


def _is_time(node: ast.AST, times: Collection[str]) -> bool:
    """Returns whether it asks a clock, or is one of these variables."""
    if isinstance(node, ast.Call):
        called = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
        return called in _CLOCK_NAMES and not node.args and not node.keywords
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in times


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
