"""Launches `cuda/prompt_product.cu`: a linear layer for thousands of tokens, on Hopper."""

from torch import Tensor

from ..cuda.compiled import CudaKernel, TileMap, cuda_kernel
from ..gpu import gpu_of
from ..host_sizes import cdiv

THREADS = 384
_CLUSTER = 2
_TOKENS, _ROWS = 128, 256
"""Of a CTA; rows of the matrix, of a gated one half of them in each half."""
_COLUMNS = 64
"""Of a box."""
_STAGES = 4
_TOKENS_OF_A_WARP = 16
_TOGETHER = 2048
"""Tokens whose tiles are taken one after the other, before the next rows of the matrix."""
_ALIGNMENT = 16
"""Of rows, in bytes."""


def shared_bytes() -> int:
    """Returns `sizeof(Shared)` of `prompt_product.cu`: tiles, results in flight, barriers."""
    results = _TOKENS // _TOKENS_OF_A_WARP * 2 * _TOKENS_OF_A_WARP * _COLUMNS * 2
    return _STAGES * ((_TOKENS + _ROWS) * _COLUMNS * 2 + 16) + results


def num_programs(num_tokens: int, width: int, *, gated: bool) -> int:
    """Returns how many CTAs results [num_tokens, width] have tiles for."""
    return _CLUSTER * cdiv(num_tokens, _CLUSTER * _TOKENS) * cdiv(width, _ROWS // (2 if gated else 1))


def prompt_kernel(*, gated: bool, added: bool, bias: bool) -> CudaKernel:
    """Returns the kernel; it takes matrices of any shape."""
    return cuda_kernel(
        "prompt_product.cu", "multiply", GATED=gated, ADDED=added, BIAS=bias, SHARED_BYTES=shared_bytes()
    )


def launch_prompt(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, added: bool = False
) -> None:
    """Queue the kernel; all bfloat16. Rows of `out` may lie apart. `added`: results are added to `out`.

    A weight with twice as many rows as there are results is a gated one.
    """
    num_tokens, width = out.shape
    gated = weight.size(0) == 2 * width
    assert gated or weight.size(0) == width, (weight.shape, out.shape)
    assert not (gated and added), "nothing is added to what a gate makes"
    x = _in_aligned_rows(x)
    at_a_time = gpu_of(x.device).multiprocessors // _CLUSTER * _CLUSTER
    prompt_kernel(gated=gated, added=added, bias=bias is not None).launch(
        grid=(min(num_programs(num_tokens, width, gated=gated), at_a_time), 1, 1),
        block=THREADS,
        args=(
            TileMap(weight, (_ROWS // _CLUSTER, _COLUMNS)),
            TileMap(x, (_TOKENS, _COLUMNS)),
            TileMap(out, (_TOKENS_OF_A_WARP, _COLUMNS)),
            x if bias is None else bias,
            num_tokens,
            x.size(1),
            width,
            cdiv(_TOGETHER, _CLUSTER * _TOKENS),
        ),
        shared_bytes=shared_bytes(),
        cluster=_CLUSTER,
    )


def _in_aligned_rows(x: Tensor) -> Tensor:
    """Returns rows that TMA can copy; they may lie apart."""
    row_bytes = x.stride(0) * x.element_size()
    if x.stride(1) == 1 and row_bytes % _ALIGNMENT == 0 and x.data_ptr() % _ALIGNMENT == 0:
        return x
    aligned = x.new_empty(x.shape)
    return aligned.copy_(x)
