"""Errors of adapters."""

from ..errors import ModelError


class AdapterError(ModelError):
    """An adapter cannot be used as given; the message names the file, field or tensor and says what to do."""
