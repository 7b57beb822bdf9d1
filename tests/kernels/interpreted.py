"""Checks that run in Triton's interpreter, each list in a process of its own."""

import os
import subprocess
import sys

import pytest

_KNOWN_FAULT = "only 0-dimensional arrays can be converted to Python scalars"


def assert_passes(module: str, which: str, seconds: float) -> None:
    """In a process of its own: the interpreter is chosen when a kernel is defined."""
    triton = pytest.importorskip("triton")
    path = os.pathsep.join(p for p in sys.path if p)
    result = subprocess.run(
        [sys.executable, "-m", module, which],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    if _KNOWN_FAULT in result.stderr:
        pytest.skip(f"Triton {triton.__version__}'s interpreter does not work with this NumPy")
    assert "all checks passed" in result.stdout, result.stdout + result.stderr[-4000:]
