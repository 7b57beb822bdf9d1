"""A failure at any line of a step's launch: which lines there are, and one of them raising."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import ostinato.engine
from ostinato.engine.core import EngineCore

ROOT = Path(ostinato.engine.__file__).parents[1]
ENGINE = ROOT / "engine"
BELOW = (
    ROOT / "graphs" / "runner.py",
    ROOT / "graphs" / "inputs" / "buffers.py",
    ROOT / "models" / "transformer.py",
)
BOOK_KEEPING = ("_take_in", "follow", "_judge", "_note_ended", "progress", "_extras", "_logprobs")
"""What is done with the tokens of the step before, if a launch has to take them in. Nothing fails there that
is not a bug; so it is with everything in `scheduling`."""


class Point(NamedTuple):
    """A place in the source, at a line or at the end of a function."""

    file: str
    function: str
    line: int
    event: str


@cache
def is_watched(code: CodeType) -> bool:
    path = Path(code.co_filename)
    if ENGINE / "scheduling" in path.parents or (ENGINE not in path.parents and path not in BELOW):
        return False
    return code.co_name not in BOOK_KEEPING and not code.co_name.startswith("<")


class Launches:
    """What is executed in the launches of an engine, counted from 0; one point of one of them may fail."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.points: list[list[Point]] = []
        """By launch, in order."""
        self.has_failed = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note where the launches inside come by."""

        def note(number: int, point: Point) -> None:
            self.points[number].append(point)

        self.points = []
        with self._traced(lambda number: note):
            yield

    @contextmanager
    def failing(self, launch: int, where: Point, error: BaseException) -> Iterator[None]:
        """The launch of that number fails where it comes by this point first."""
        self.has_failed = False

        def fail(number: int, point: Point) -> None:
            if point == where and not self.has_failed:
                self.has_failed = True
                raise error

        with self._traced(lambda number: fail if number == launch else None):
            yield

    @contextmanager
    def _traced(self, watcher_of: Callable[[int], Callable[[int, Point], None] | None]) -> Iterator[None]:
        launch, numbers = self._core._launch, iter(range(10_000))

        def traced(*args: Any) -> Any:
            number = next(numbers)
            self.points.append([])
            watcher = watcher_of(number)
            if watcher is None:
                return launch(*args)

            def come_by(frame: FrameType, event: str, _: Any) -> Any:
                if event in ("line", "return"):
                    code = frame.f_code
                    watcher(number, Point(Path(code.co_filename).name, code.co_name, frame.f_lineno, event))
                return come_by

            before = sys.gettrace()
            sys.settrace(lambda frame, event, _: come_by if is_watched(frame.f_code) else None)
            try:
                return launch(*args)
            finally:
                sys.settrace(before)

        with patch.object(self._core, "_launch", traced):
            yield
