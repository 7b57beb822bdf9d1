"""What attention refuses."""


class BackendError(ValueError):
    """A backend that does not exist, or that cannot run on this device."""
