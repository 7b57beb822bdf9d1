"""Errors of memory savers."""


class SaverError(RuntimeError):
    """Memory cannot be released, restored or allocated as requested. Nothing has changed."""


class SaverMemoryError(SaverError, MemoryError):
    """There is not enough memory on the device or on the host. Nothing has changed; free some and retry."""
