"""The kernels of linear layers as custom ops; each picks its tile by shape."""

import torch
import triton
from torch import Tensor

from .. import dependent_launch
from ..custom_op import custom_op
from .tiles import RESIDENT_TOKENS, MatrixShape, gemv_tile, resident_tile, skinny_tile
from .triton_gemv import _gemv
from .triton_resident import _resident
from .triton_skinny import _skinny

# Larger matrices stream at the memory's speed by themselves, and would only push each other out of L2.
_MOST_PREFETCHED_BYTES = 32 << 20


@custom_op("project_few_tokens")
def project_few_tokens(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    gated: bool,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """See `few_tokens.project`; x is dense [T, in] with T from 1 to 16."""
    out = x.new_empty(x.size(0), weight.size(0) // (2 if gated else 1), dtype=dtype)
    _launch_few_tokens(x, weight, bias, norm_weight, eps, gated, residual, out)
    return out


@project_few_tokens.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    gated: bool,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return x.new_empty(x.size(0), weight.size(0) // (2 if gated else 1), dtype=dtype)


@custom_op("multiply_skinny")
def multiply_skinny(
    x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, dtype: torch.dtype
) -> Tensor:
    """`x @ weight.T + bias`, gated if asked, of dense rows x [T, in] for which there is a tile."""
    out = x.new_empty(x.size(0), weight.size(0) // (2 if gated else 1), dtype=dtype)
    _launch_skinny(x, weight, bias, gated, out)
    return out


@multiply_skinny.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.size(0), weight.size(0) // (2 if gated else 1), dtype=dtype)


@custom_op("multiply_into", mutates_args=("out",))
def multiply_into(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """`x @ weight.T` into dense rows `out` [T, out], for one token or where there is a skinny tile."""
    if x.size(0) == 1:
        _launch_few_tokens(x, weight, None, None, 0.0, False, None, out)
    else:
        _launch_skinny(x, weight, None, False, out)


@multiply_into.register_fake
def _(x: Tensor, weight: Tensor, out: Tensor) -> None:
    return None


def _launch_few_tokens(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    gated: bool,
    residual: Tensor | None,
    out: Tensor,
) -> None:
    num_tokens, in_features = x.shape
    assert 1 <= num_tokens <= RESIDENT_TOKENS, num_tokens
    shape = MatrixShape(out.size(1), in_features, gated)
    operands = (
        x,
        x if norm_weight is None else norm_weight,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
    )
    constants = {
        "out_features": shape.out_features,
        "in_features": in_features,
        "norm": norm_weight is not None,
        "gated": gated,
        "has_bias": bias is not None,
        "has_residual": residual is not None,
        **dependent_launch.options(x.device),
    }
    if num_tokens == 1:
        gemv = gemv_tile(shape)
        _gemv[(triton.cdiv(shape.out_features, gemv.rows),)](
            *operands, eps, rows=gemv.rows, block=gemv.block, num_warps=gemv.num_warps, **constants
        )
        return
    tile = resident_tile(shape)
    assert tile is not None, shape
    _resident[(triton.cdiv(shape.out_features, tile.rows),)](
        *operands,
        num_tokens,
        eps,
        tokens=RESIDENT_TOKENS,
        rows=tile.rows,
        slices=tile.slices,
        width=tile.width,
        num_warps=tile.num_warps,
        **constants,
    )


def _launch_skinny(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, out: Tensor) -> None:
    num_tokens, in_features = x.shape
    shape = MatrixShape(out.size(1), in_features, gated)
    tile = skinny_tile(shape, num_tokens)
    assert tile is not None, (shape, num_tokens)
    is_even = shape.out_features % tile.rows == 0 and in_features % 8 == 0
    _skinny[(triton.cdiv(num_tokens, tile.tokens), triton.cdiv(shape.out_features, tile.rows))](
        x,
        weight,
        x if bias is None else bias,
        out,
        num_tokens,
        out_features=shape.out_features,
        in_features=in_features,
        gated=gated,
        has_bias=bias is not None,
        tokens=tile.tokens,
        rows=tile.rows,
        block=tile.block,
        prefetch=is_even and weight.nbytes <= _MOST_PREFETCHED_BYTES,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent_launch.options(x.device),
    )
