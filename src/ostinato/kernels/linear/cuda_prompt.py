"""Launches `cuda/prompt_product.cu`: a linear layer for thousands of tokens, on Hopper."""

from torch import Tensor

from ..cuda.compiled import CudaKernel, TileMap, cuda_kernel
from ..gpu import gpu_of
from ..host_sizes import cdiv
from .tiles import PromptTile

THREADS = 384
_TOKENS, _ROWS = 128, 256
"""Of a program; rows of the matrix, of a gated one half of them in each half."""
_COLUMNS = 64
"""Of a box."""
_TOKENS_OF_A_WARP = 16
_NEIGHBOURS = 16
"""Multiprocessors, at least, of those that clusters of four can be made of: one more pair is left over."""


def shared_bytes(tile: PromptTile) -> int:
    """As `sizeof(Shared)` there: tiles, results on their way, counts."""
    results = _TOKENS // _TOKENS_OF_A_WARP * 2 * _TOKENS_OF_A_WARP * _COLUMNS * 2
    return tile.stages * ((_TOKENS + _ROWS) * _COLUMNS * 2 + 16) + results


def prompt_kernel(tile: PromptTile, *, gated: bool, added: bool, bias: bool) -> CudaKernel:
    """The kernel; for matrices of any shape."""
    return cuda_kernel(
        "prompt_product.cu",
        "multiply",
        GATED=gated,
        ADDED=added,
        BIAS=bias,
        STAGES=tile.stages,
        CLUSTER=tile.cluster,
        LEAD=tile.lead,
        SHARED_BYTES=shared_bytes(tile),
    )


def launch_prompt(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: PromptTile, *, added: bool = False
) -> None:
    """Queue the kernel; all bfloat16. Rows of x may lie apart. `added`: results are added to `out`.

    A weight with twice as many rows as there are results is a gated one.
    """
    num_tokens, width = out.shape
    gated = weight.size(0) == 2 * width
    assert gated or weight.size(0) == width, (weight.shape, out.shape)
    assert not (gated and added), "nothing is added to what a gate makes"
    kernel = prompt_kernel(tile, gated=gated, added=added, bias=bias is not None)
    tokens = tile.cluster * _TOKENS
    tiles = cdiv(num_tokens, tokens) * cdiv(width, _ROWS // (2 if gated else 1))
    kernel.launch(
        grid=(_clusters(tiles, tile, gpu_of(x.device).multiprocessors) * tile.cluster, 1, 1),
        block=THREADS,
        args=(
            TileMap(weight, (_ROWS // max(2, tile.cluster), _COLUMNS)),
            TileMap(x, (_TOKENS, _COLUMNS)),
            TileMap(out, (_TOKENS_OF_A_WARP, _COLUMNS)),
            x if bias is None else bias,
            num_tokens,
            x.size(1),
            width,
            cdiv(tile.together, tokens),
        ),
        shared_bytes=shared_bytes(tile),
        cluster=tile.cluster,
    )


def _clusters(tiles: int, tile: PromptTile, multiprocessors: int) -> int:
    """As few as need no longer than the most would: all have as many tiles, and the last ones run in step."""
    if tile.cluster > 2:
        multiprocessors = multiprocessors // _NEIGHBOURS * _NEIGHBOURS
    most = multiprocessors // tile.cluster
    return cdiv(tiles, cdiv(tiles, most)) if tile.even else min(tiles, most)
