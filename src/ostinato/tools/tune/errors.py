"""Errors of tuning."""

from ostinato.graphs import OstinatoError


class TuneError(OstinatoError, ValueError):
    """The requested measurement is not possible; the message says why."""
