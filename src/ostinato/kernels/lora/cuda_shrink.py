"""Launches `cuda/shrink.cu`: dozens of tokens times the first matrix of their adapters."""

import torch
from torch import Tensor

from ..cuda import compiled
from ..cuda.compiled import CudaKernel, cuda_kernel
from ..custom_op import custom_op
from ..host_sizes import cdiv
from .adapter_rows import ToShrink
from .choice import tokens_together

MOST_TOKENS = 256
_RANKS, _WARPS = 8, 8
_STEPS = 4
"""Of 32 columns that a warp should take at most."""
_MOST_PROGRAMS_FOR_BLOCKS = 16


def is_the_choice(x: Tensor) -> bool:
    """Tells whether rows x [T, in] should run so."""
    return (
        compiled.is_supported(x.device)
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.size(0) <= MOST_TOKENS
        and x.size(1) % 32 == 0
    )


def slices_of(in_features: int) -> int:
    """Returns the CTAs of a cluster, which split the columns."""
    return next(n for n in (1, 2, 4, 8) if n == 8 or in_features <= n * _WARPS * 32 * _STEPS)


def compiled_tokens(num_tokens: int) -> int:
    """Returns the tokens of a block that the kernel is compiled for; there are never more."""
    return max(8, tokens_together(num_tokens))


def shared_bytes(tokens: int) -> int:
    """Returns `sizeof(Shared)` of `shrink.cu`."""
    return (_WARPS + 1) * tokens * _RANKS * 4 + 16


def _registers(in_features: int, tokens: int, *, norm: bool) -> int:
    """Returns the registers of a thread: a CTA must fit beside one of `wide`, or it begins behind it."""
    steps = cdiv(in_features, slices_of(in_features) * _WARPS * 32)
    if norm or tokens > 8:  # beside products that leave more
        return 96 if steps <= 2 * _STEPS else 160
    return 64 if steps <= _STEPS else 72 if steps <= 2 * _STEPS else 160


def shrink_kernel(
    in_features: int, tokens: int, *, norm: bool, dtype: torch.dtype = torch.bfloat16
) -> CudaKernel:
    """Returns the kernel for so many columns, and tokens of a block."""
    slices = slices_of(in_features)
    return cuda_kernel(
        "shrink.cu",
        "shrink",
        IN=in_features,
        TOKENS=tokens,
        NORM=norm,
        HALF=dtype == torch.float16,
        WARPS=_WARPS,
        REGISTERS=_registers(in_features, tokens, norm=norm),
        SLICES=slices,
        SHARED_BYTES=shared_bytes(tokens),
    )


def launch_shrink(operands: ToShrink, shrunk: Tensor, *, plain: bool = False) -> None:
    """Queues the kernel, as a plain launch if asked; `shrunk` is float32 [T, parts * room]."""
    x, norm_weight, a, room, ranks, order, blocks = operands
    norm = x if norm_weight is None else norm_weight
    assert not (x.data_ptr() | a.data_ptr() | norm.data_ptr()) % 16, "16 bytes are loaded at a time"
    assert x.stride(1) == 1, "columns lie beside each other"
    assert x.stride(0) % 8 == 0, "rows begin at multiples of 16 bytes"
    (_, width, in_features), num_blocks, slices = a.shape, blocks.size(1), slices_of(x.size(1))
    tokens = compiled_tokens(x.size(0))
    shrink_kernel(in_features, tokens, norm=norm_weight is not None, dtype=x.dtype).launch(
        grid=(width // _RANKS * slices, min(num_blocks, _MOST_PROGRAMS_FOR_BLOCKS), 1),
        block=_WARPS * 32,
        args=(a, norm, x, ranks, order, blocks, shrunk, num_blocks, x.stride(0), width, room),
        shared_bytes=shared_bytes(tokens),
        cluster=slices,
        dependent=not plain,
    )


@custom_op("lora_shrink_in_clusters", result=lambda operands: room_for_sums(operands.x, operands.a))
def shrink(operands: ToShrink) -> Tensor:
    """Returns what `triton_shrink.shrink` does, added up by the cluster: float32 [1, T, parts * room]."""
    shrunk = room_for_sums(operands.x, operands.a)
    launch_shrink(operands, shrunk)
    return shrunk


def room_for_sums(x: Tensor, a: Tensor) -> Tensor:
    """Allocates what `launch_shrink` fills."""
    return x.new_empty(1, x.size(0), a.size(1), dtype=torch.float32)
