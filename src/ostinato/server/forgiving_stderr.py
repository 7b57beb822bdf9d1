"""Standard error that may be full or gone: what cannot be written is lost, and nothing else is."""

from __future__ import annotations

import contextlib
import io
import os
import sys


class ForgivingStderr(io.TextIOBase):
    """Writes at once, so that nothing waits in a buffer for a disk to have room again."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def write(self, text: str) -> int:
        """Write what can be written."""
        left = memoryview(text.encode(errors="backslashreplace"))
        with contextlib.suppress(OSError):
            while left:
                left = left[os.write(2, left) :]
        return len(text)

    def fileno(self) -> int:
        """The descriptor."""
        return 2

    def isatty(self) -> bool:
        """Whether somebody watches."""
        return os.isatty(2)

    def writable(self) -> bool:
        """Always."""
        return True


def forgive_stderr() -> None:
    """Let this process write to standard error without having to care."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    sys.stderr = ForgivingStderr()
