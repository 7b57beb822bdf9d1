"""Which line of the user's code is at fault: the innermost frame that is neither torch's nor ours."""

import sys
import traceback
from pathlib import Path
from types import FrameType, TracebackType

import torch

_PACKAGES = (str(Path(file).resolve().parent) for file in (__file__, torch.__file__))
_HIDDEN_PREFIXES = (*_PACKAGES, "<frozen", "<string>")
_HIDDEN_PARTS = ("/triton/", "/contextlib.py", "/functools.py")


def _innermost(frames: traceback.StackSummary) -> str | None:
    for frame in reversed(frames):
        file = frame.filename
        if not file.startswith(_HIDDEN_PREFIXES) and not any(part in file for part in _HIDDEN_PARTS):
            return f"{file}:{frame.lineno} in {frame.name}" + (f": {frame.line}" if frame.line else "")
    return None


def calling_line(frame: FrameType | None = None) -> str | None:
    """The user's line that is executing now, as ``file:line in function: source``."""
    return _innermost(traceback.extract_stack(frame or sys._getframe(1)))


def raising_line(tb: TracebackType | None) -> str | None:
    """The user's line that an exception came from."""
    return _innermost(traceback.extract_tb(tb))
