"""Which steps run the same compiled kernels, so that one warm-up serves them all.

Kernels take token counts and lengths as run-time values. What is compiled apart are tiles, and tiles follow
from the number of tokens in a few ranges.
"""

from collections.abc import Hashable, Iterable

import torch

from .attention.choice import cascade_class, decode_class
from .gpu import gpu_of
from .linear.choice import choose
from .linear.tiles import MatrixShape, compiled_variant
from .lora.choice import adapters_class


def kernel_class(
    products: Iterable[tuple[MatrixShape, int]],
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_decode: bool,
    is_cascade: bool = False,
    num_slots: int = 0,
    query_len: int = 1,
) -> Hashable:
    """Equal for steps that need the same compiled kernels, on the same model.

    `products` are the matrices of a step with the number of rows that each is multiplied with; `num_slots`:
    for adapters, 0 in a step without; `query_len`: tokens of each request, where it is a decode step.
    """
    products = list(products)
    linear: tuple[Hashable, ...] = tuple(
        compiled_variant(choose(shape, num_rows, dtype, device), num_rows) for shape, num_rows in products
    )
    if num_slots:
        widths = {shape.in_features for shape, _ in products}
        linear += (adapters_class(num_tokens, num_slots, widths),)
    if not is_decode:
        return linear
    # Layers with a window attend as if nothing was shared.
    shared = cascade_class(num_tokens, num_heads, num_kv_heads, dtype) if is_cascade else None
    return (
        linear,
        decode_class(num_tokens // query_len, num_kv_heads, dtype, gpu_of(device), query_len),
        shared,
    )
