"""What the benchmarks raise for their users."""

from ostinato.graphs import OstinatoError


class BenchError(OstinatoError, RuntimeError):
    """A benchmark cannot run as asked, or its outputs are wrong; the text says what to do."""
