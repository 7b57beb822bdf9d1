"""Top-k, top-p and min-p: a torch reference that sorts, and kernels that do not."""

from .cuts import is_kept, reference

__all__ = ["is_kept", "reference"]
