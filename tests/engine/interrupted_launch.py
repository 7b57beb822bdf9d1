"""A failure at any line of a verb of a step (its launch, what is done when it lands): which lines there are,
and one of them raising."""

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
    ROOT / "cache" / "pages.py",
    ROOT / "cache" / "prefix_index.py",
)


LAST_RESORT = ("give_up", "_concerned_by", "restore")
"""What is done once something has failed."""


class Point(NamedTuple):
    """A place in the source, at a line or at the end of a function."""

    file: str
    function: str
    line: int
    event: str


@cache
def is_watched(code: CodeType) -> bool:
    path = Path(code.co_filename)
    if ENGINE not in path.parents and path not in BELOW:
        return False
    return code.co_name not in LAST_RESORT and not code.co_name.startswith("<")


class Launches:
    """What is executed in the launches of an engine, counted from 0; one point of one of them may fail.

    So with another verb than `_launch`.
    """

    def __init__(self, core: EngineCore, verb: str = "_launch") -> None:
        self._core, self._verb = core, verb
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
        launch, numbers = getattr(self._core, self._verb), iter(range(10_000))

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

        with patch.object(self._core, self._verb, traced):
            yield
