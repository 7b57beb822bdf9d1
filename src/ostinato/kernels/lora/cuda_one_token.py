"""Launches `cuda/one_token.cu`: what an adapter adds for one token, in one kernel."""

import torch
from torch import Tensor

from ..cuda import compiled
from ..cuda.compiled import CudaKernel, cuda_kernel
from ..custom_op import custom_op
from ..host_sizes import cdiv

_WARPS, _CLUSTER, _PROGRAMS = 8, 8, 64
_REGISTERS_FOR_WEIGHTS = 64


def is_the_choice(x: Tensor) -> bool:
    """Whether rows x [T, in] should run so."""
    return (
        compiled.is_supported(x.device)
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.size(0) == 1
        and x.size(1) % 8 == 0
    )


def shared_bytes(width: int) -> int:
    """As `sizeof(Shared)` there."""
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
    """The kernel for a stack of adapters: `width` ranks of all parts, `room` of each."""
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


def launch_one_token(
    x: Tensor,
    norm_weight: Tensor | None,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    slots: Tensor,
    second: int,
    third: int,
    deltas: Tensor,
) -> None:
    """Queue the kernel; all operands dense, `deltas` float32 [1, out]."""
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


@custom_op("lora_one_token")
def one_token(
    x: Tensor,
    norm_weight: Tensor | None,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    slots: Tensor,
    second: int,
    third: int,
) -> Tensor:
    """float32 [1, out]: `b @ (a @ x)` of the token's slot, part by part; undefined without an adapter.

    x is multiplied with `norm_weight` if that is given. `second`, `third`: the first rows of these parts.
    """
    deltas = _room(x, b)
    launch_one_token(x, norm_weight, a, b, ranks, slots, second, third, deltas)
    return deltas


@one_token.register_fake
def _(
    x: Tensor,
    norm_weight: Tensor | None,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    slots: Tensor,
    second: int,
    third: int,
) -> Tensor:
    return _room(x, b)


def _room(x: Tensor, b: Tensor) -> Tensor:
    return x.new_empty(1, b.size(1), dtype=torch.float32)
