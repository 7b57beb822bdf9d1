"""Which line of the user's code is at fault: the innermost frame that is neither torch's nor ours."""

import sys
import traceback
from pathlib import Path
from types import FrameType, TracebackType

import torch

_OURS = str(Path(__file__).resolve().parent)
_TORCH = str(Path(torch.__file__).resolve().parent)
_HIDDEN_PREFIXES = (_OURS, _TORCH, "<frozen", "<string>")
_HIDDEN_PARTS = ("/triton/", "/contextlib.py", "/functools.py")


def _is_users(filename: str) -> bool:
    return not filename.startswith(_HIDDEN_PREFIXES) and not any(part in filename for part in _HIDDEN_PARTS)


def _describe(frame: traceback.FrameSummary) -> str:
    line = f": {frame.line}" if frame.line else ""
    return f"{frame.filename}:{frame.lineno} in {frame.name}{line}"


def _innermost(frames: traceback.StackSummary) -> str | None:
    for frame in reversed(frames):
        if _is_users(frame.filename):
            return _describe(frame)
    return None


def calling_line(frame: FrameType | None = None) -> str | None:
    """The user's line that is executing now, as ``file:line in function: source``."""
    return _innermost(traceback.extract_stack(frame or sys._getframe(1)))


def raising_line(tb: TracebackType | None) -> str | None:
    """The user's line that an exception came from."""
    return _innermost(traceback.extract_tb(tb))
