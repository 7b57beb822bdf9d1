"""Standard output and error that may be full or gone: what cannot be written is lost, and nothing else is."""

from __future__ import annotations

import contextlib
import io
import os
import sys


class ForgivingStream(io.TextIOBase):
    """Writes at once, so that nothing waits in a buffer for a disk to have room again."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        """Write what can be written."""
        left = memoryview(text.encode(errors="backslashreplace"))
        with contextlib.suppress(OSError):
            while left:
                left = left[os.write(self._descriptor, left) :]
        return len(text)

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether somebody watches."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Always."""
        return True


def forgive_full_disks() -> None:
    """Let this process write to its standard streams without having to care."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    sys.stdout, sys.stderr = ForgivingStream(1), ForgivingStream(2)
