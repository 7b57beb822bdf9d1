"""Launches `cuda/one_token.cu`: what an adapter adds for one token, in one kernel."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..cuda import compiled
from ..cuda.compiled import CudaKernel, cuda_kernel
from ..custom_op import custom_op
from ..host_sizes import cdiv

_WARPS, _CLUSTER, _PROGRAMS = 8, 8, 64
_REGISTERS_FOR_WEIGHTS = 64


def is_the_choice(x: Tensor) -> bool:
    """Tells whether rows x [T, in] should run so."""
    return (
        compiled.is_supported(x.device)
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.size(0) == 1
        and x.size(1) % 8 == 0
    )


def shared_bytes(width: int) -> int:
    """Returns `sizeof(Shared)` of `one_token.cu`."""
    return (_CLUSTER + 1) * width * 4 + 16


def one_token_kernel(
    in_features: int,
    out_features: int,
    width: int,
    room: int,
    *,
    norm: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> CudaKernel:
    """Returns the kernel for a stack of adapters: `width` ranks of all parts, `room` of each."""
    pieces = cdiv(in_features, _CLUSTER * 256)
    return cuda_kernel(
        "one_token.cu",
        "add_one",
        IN=in_features,
        OUT=out_features,
        WIDTH=width,
        ROOM=room,
        NORM=norm,
        HALF=dtype == torch.float16,
        WARPS=_WARPS,
        PROGRAMS=_PROGRAMS,
        HELD=max(1, _REGISTERS_FOR_WEIGHTS // (pieces * 4)),
        SHARED_BYTES=shared_bytes(width),
    )


class OneToken(NamedTuple):
    """The operands of one token; x and the matrices are dense."""

    x: Tensor
    """[1, in]."""
    norm_weight: Tensor | None
    """What x is multiplied with; None: nothing."""
    a: Tensor
    b: Tensor
    ranks: Tensor
    slots: Tensor
    second: int
    """First row of the second part, or `out`."""
    third: int

    def empty_result(self) -> Tensor:
        """Allocates float32 [1, out]."""
        return self.x.new_empty(1, self.b.size(1), dtype=torch.float32)


def launch_one_token(operands: OneToken, deltas: Tensor) -> None:
    """Queues the kernel; `deltas` is float32 [1, out]."""
    x, norm_weight, a, b, ranks, slots, second, third = operands
    norm = x if norm_weight is None else norm_weight
    assert x.size(0) == 1, "one token"
    pointers = x.data_ptr() | a.data_ptr() | b.data_ptr() | norm.data_ptr()
    assert not pointers % 16, "16 bytes are loaded at a time"
    (_, width, in_features), (_, out_features, room) = a.shape, b.shape
    has_norm = norm_weight is not None
    one_token_kernel(in_features, out_features, width, room, norm=has_norm, dtype=x.dtype).launch(
        grid=(_PROGRAMS, 1, 1),
        block=_WARPS * 32,
        args=(a, b, norm, x, ranks, slots, deltas, second, third),
        shared_bytes=shared_bytes(width),
        cluster=_CLUSTER,
    )


@custom_op("lora_one_token", result=lambda operands: operands.empty_result())
def one_token(operands: OneToken) -> Tensor:
    """Returns `b @ (a @ x)` of the token's slot, part by part; undefined without an adapter."""
    deltas = operands.empty_result()
    launch_one_token(operands, deltas)
    return deltas
