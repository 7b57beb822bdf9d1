"""Errors for weights that another process sends."""

from ostinato.graphs import OstinatoError


class TransferError(OstinatoError, ValueError):
    """The weights were refused or did not arrive; nothing has changed."""


class TransferTimeout(TransferError, TimeoutError):
    """A trainer did not come in time; nothing has changed."""
