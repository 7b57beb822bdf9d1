"""What can be wrong with an adapter."""

from ..errors import ModelError


class AdapterError(ModelError):
    """An adapter cannot be used as given; the text names the file, field or tensor and what to do."""
