"""What can keep a table from being made."""

from ostinato.graphs import OstinatoError


class TuneError(OstinatoError, ValueError):
    """Nothing can be measured as asked; the text says why."""
