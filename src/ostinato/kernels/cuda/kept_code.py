"""Machine code on disk with a sum behind it, so that no file is loaded that is cut, changed or another's."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger("ostinato.kernels")

FORMAT = "code, then SHA-256 of key and code"
"""Belongs to the key, so that files of another format have other names."""


def read(file: Path, key: str) -> bytes | None:
    """What was kept for this key; None if nothing was, or something else is there."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    code, found = content[:-32], content[-32:]
    if code and found == _sum(key, code):
        return code
    logger.warning("%s is damaged: the kernel is compiled again", file)
    return None


def keep(file: Path, key: str, code: bytes) -> None:
    """Write it down; a folder that cannot be written to only costs time at the next start."""
    # Several processes may compile at once: a file appears with all its bytes or not at all.
    new = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(code + _sum(key, code))
        os.replace(new, file)
    except OSError:
        with suppress(OSError):
            new.unlink()


def _sum(key: str, code: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + code).digest()
