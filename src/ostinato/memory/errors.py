"""What goes wrong with released memory."""


class SaverError(RuntimeError):
    """Memory cannot be released, taken back or allocated as asked. Nothing has changed."""


class SaverMemoryError(SaverError, MemoryError):
    """There is not enough memory on the device or on the host. Nothing has changed: try again with more."""
