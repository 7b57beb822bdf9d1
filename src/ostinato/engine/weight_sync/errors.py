"""What can be wrong with weights that another process sends."""

from ostinato.graphs import OstinatoError


class TransferError(OstinatoError, ValueError):
    """They were refused, or did not come; nothing has changed."""


class TransferTimeout(TransferError, TimeoutError):
    """A trainer did not come in time; nothing has changed."""
