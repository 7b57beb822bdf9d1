"""Which line of the user's code is at fault: the innermost frame that is neither ours nor a library's.

Where a library's code runs below that line, its own line is named as well, and `known_calls` knows what to do
about many of them.
"""

import dis
import linecache
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple, TypeAlias

import torch

Frames: TypeAlias = list[tuple[FrameType, int]]
"""Frames with the line that each executes, innermost first."""

_TORCH = str(Path(torch.__file__).resolve().parent)
_OURS = str(Path(__file__).resolve().parent)
_HIDDEN_PARTS = ("/triton/", "/contextlib.py", "/functools.py", "/runpy.py")
_PASS_ON = "__init__ nn/modules/module overrides _tensor _ops _jit_internal functional utils/"
_MACHINERY = tuple(f"{_TORCH}/{file}" for file in _PASS_ON.split())
"""Files of torch's that say nothing of what was called."""
_PYTHONS_OWN = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})


class Blame(NamedTuple):
    """Where something was done that cannot be captured."""

    line: str | None
    """The user's line, as ``file:line in function: source``."""
    inside: str | None = None
    """The line of a library, called from there, that did it."""

    def __str__(self) -> str:
        return "; inside ".join(part for part in self if part)


@cache
def _is_hidden(file: str, module: str) -> bool:
    """Returns whether a file is torch's, ours, or one that only passes calls on."""
    if file.startswith(("<frozen", "<string>")):
        return module != "__main__"  # `python -c` calls the user's code so
    return file.startswith((_TORCH, _OURS)) or any(part in file for part in _HIDDEN_PARTS)


@cache
def _is_library(file: str) -> bool:
    """Returns whether a file was installed, and is not the user's own."""
    return any(f"/{part}/" in file for part in ("site-packages", "dist-packages")) or file.startswith(
        _PYTHONS_OWN
    )


def is_users(frame: FrameType) -> bool:
    """Returns whether a frame runs code of the user's own."""
    file = frame.f_code.co_filename
    return not _is_hidden(file, frame.f_globals.get("__name__", "")) and not _is_library(file)


def frames_now(frame: FrameType | None = None) -> Frames:
    """The frames that are executing."""

    def outwards(each: FrameType | None) -> Iterator[tuple[FrameType, int]]:
        while each is not None:
            yield each, each.f_lineno
            each = each.f_back

    return list(outwards(frame or sys._getframe(1)))


def frames_of(error: TracebackType | None) -> Frames:
    """The frames that an exception came through, and those that still wait for the one that caught it."""
    waiting = frames_now(error.tb_frame.f_back) if error is not None and error.tb_frame.f_back else []
    frames = []
    while error is not None:
        frames.append((error.tb_frame, error.tb_lineno))
        error = error.tb_next
    return frames[::-1] + waiting


def below_user(frames: Frames) -> Frames:
    """Those of libraries that the user's innermost line is waiting for; all if there is no such line."""
    return list(takewhile(lambda each: not is_users(each[0]), frames))


def blamed(frames: Frames) -> Blame:
    """The user's line, and a library's below it. Without a line of the user's, a library's stands for it."""
    below = below_user(frames)
    shown = [each for each in below if not _is_machinery(*each)]
    if len(below) < len(frames):
        return Blame(frame_line(*frames[len(below)]), frame_line(*shown[0]) if shown else None)
    files = [each for each in shown if not each[0].f_code.co_filename.startswith(_TORCH)]
    return Blame(frame_line(*files[0]) if files else None)


def calling_line() -> str | None:
    """The user's line that is executing now, as ``file:line in function: source``."""
    return blamed(frames_now(sys._getframe(1))).line


def raising_line(tb: TracebackType | None) -> str | None:
    """The user's line that an exception came from."""
    return blamed(frames_of(tb)).line


def _is_machinery(frame: FrameType, _line: int) -> bool:
    """Returns whether a frame tells a reader nothing: ours, or one of torch's that only passes calls on."""
    file, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
    return file.startswith(_MACHINERY) or (_is_hidden(file, module) and not file.startswith(_TORCH))


def frame_line(frame: FrameType, number: int) -> str:
    """A line of a frame's code, as ``file:line in function: source``."""
    linecache.lazycache(frame.f_code.co_filename, frame.f_globals)
    return _code_line(frame.f_code, number)


def line_using(name: str, codes: Iterable[CodeType]) -> str | None:
    """The line that assigns a variable or attribute, or else reads it: the last part of the name counts."""
    called = name.split("[")[0].rstrip(". ").rpartition(".")[2]
    users = [code for code in codes if called in (*code.co_names, *code.co_varnames, *code.co_freevars)]
    for kind in ("STORE_", "LOAD_"):
        for code in sorted(users, key=lambda code: (code.co_filename, code.co_firstlineno)):
            is_own = not _is_hidden(code.co_filename, "") and not _is_library(code.co_filename)
            for step in dis.get_instructions(code) if is_own else ():
                number = step.positions.lineno if step.positions is not None else None
                if step.opname.startswith(kind) and step.argval == called and number is not None:
                    return _code_line(code, number)
    return None


def _code_line(code: CodeType, number: int) -> str:
    source = linecache.getline(code.co_filename, number).strip()
    return f"{code.co_filename}:{number} in {code.co_name}" + (f": {source}" if source else "")
