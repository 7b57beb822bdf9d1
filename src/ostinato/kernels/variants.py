"""Which steps run the same compiled kernels, so that one warm-up serves them all.

Kernels take token counts and lengths as run-time values. What is compiled apart are tiles, and tiles follow
from the number of tokens in a few ranges.
"""

from collections.abc import Hashable

import torch

from .attention.decode_tiles import decode_class
from .linear.tiles import RESIDENT_TOKENS, SKINNY_TOKENS


def kernel_class(num_tokens: int, num_kv_heads: int, dtype: torch.dtype, *, is_decode: bool) -> Hashable:
    """Equal for steps that need the same compiled kernels, on the same model."""
    limits = sorted({1, RESIDENT_TOKENS, *SKINNY_TOKENS})
    linear = next((limit for limit in limits if num_tokens <= limit), None)
    return (linear, decode_class(num_tokens, num_kv_heads, dtype)) if is_decode else linear
