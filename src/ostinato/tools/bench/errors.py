"""Errors of benchmarks."""

from ostinato.graphs import OstinatoError


class BenchError(OstinatoError, RuntimeError):
    """A benchmark cannot run as requested, or its outputs are wrong; the message says what to do."""
