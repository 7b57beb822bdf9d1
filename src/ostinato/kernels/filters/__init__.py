"""Top-k, top-p and min-p: a torch reference that sorts, and kernels that do not."""

from .cuts import find_cuts, is_kept, reference

__all__ = ["find_cuts", "is_kept", "reference"]
