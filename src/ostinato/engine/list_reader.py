"""Token ids out of long lists, in C: `array` takes six times as long for them.

The C is compiled in the background when the first long list is seen, and used as soon as it is there. Where
there is no compiler, or Python's headers are missing, lists are read as before.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sysconfig
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

logger = logging.getLogger("ostinato.engine")

LONG = 512
"""Lists of so many are worth it."""
_SOURCE = Path(__file__).with_suffix(".c")

IntArray = np.ndarray[Any, np.dtype[Any]]
Read = Callable[[list[Any]], IntArray | None]
"""The ids of a list as int32; None if not all of them are plain integers of at least 0 below 2**30."""


class ListReader:
    """The function, once it is there."""

    def __init__(self) -> None:
        self._read: Read | None = None
        self._lock = threading.Lock()
        self._is_asked = False

    def read(self, ids: list[Any]) -> IntArray | None:
        """The ids of a long list; None if somebody else has to read them."""
        if self._read is not None:
            return self._read(ids)
        with self._lock:
            is_first, self._is_asked = not self._is_asked, True
        if is_first:
            threading.Thread(target=self._make, name="compile list_reader.c", daemon=True).start()
        return None

    def _make(self) -> None:
        try:
            self._read = compiled()
        except (OSError, subprocess.SubprocessError, RuntimeError) as error:
            logger.info("lists of token ids are read by array, a few times slower: %s", error)


def compiled() -> Read:
    """Compile it; RuntimeError or OSError says why it cannot be."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("there is no C compiler")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "list_reader.so"
        headers = f"-I{sysconfig.get_paths()['include']}"
        command = [compiler, "-O2", "-shared", "-fPIC", headers, "-o", str(library), str(_SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode != 0:
            raise RuntimeError(f"{compiler} cannot compile {_SOURCE.name}: {done.stderr.strip()}")
        function = ctypes.PyDLL(str(library)).read_ids
    function.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)
    function.restype = ctypes.c_ssize_t

    def read(ids: list[Any]) -> IntArray | None:
        count = len(ids)
        found = np.empty(count, dtype=np.int32)
        place = found.__array_interface__["data"][0]
        return found if function(ids, place, count) == count else None

    return read


reader = ListReader()
