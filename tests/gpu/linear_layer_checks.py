"""Checks of the CUDA kernels for linear layers on the GPU, against float64."""

from collections.abc import Callable

import torch
from torch import Tensor

from ostinato.kernels.linear import few_tokens
from ostinato.kernels.linear.cuda_few_tokens import FusedLayer
from ostinato.kernels.linear.tiles import CudaGemvTile, FragmentsTile, MatrixShape, StreamedTile

CudaTile = CudaGemvTile | FragmentsTile | StreamedTile
Launch = Callable[..., None]


def random(*shape: int, scale: float = 1.0) -> Tensor:
    """Bfloat16 on the GPU."""
    return (torch.randn(shape, device="cuda") * scale).bfloat16()


def error(y: Tensor, reference: Tensor) -> float:
    """Relative, over all of it; NaN is larger than everything."""
    distance = ((y.double() - reference).norm() / reference.norm()).item()
    return distance if distance == distance else float("inf")


def check_layer(
    launch: Launch,
    shape: MatrixShape,
    tile: CudaTile,
    token_counts: tuple[int, ...],
    *,
    norm: bool,
    bias: bool,
    residual: bool,
    dtype: torch.dtype,
    most_error: float,
) -> None:
    """A layer at each number of tokens, and that nothing is written behind the last one."""
    torch.manual_seed(0)
    assert tile.fits(shape)
    width = shape.in_features
    weight = random(shape.out_features * (2 if shape.gated else 1), width, scale=width**-0.5)
    shift = random(weight.size(0)) if bias else None
    norm_weight = random(width) if norm else None
    for num_tokens in token_counts:
        x = random(num_tokens, width, scale=3.0)
        old = random(num_tokens, shape.out_features) if residual else None
        out = torch.full((num_tokens + 1, shape.out_features), 7.0, device="cuda", dtype=dtype)
        layer = FusedLayer(x, weight, shift, norm_weight, 1e-5, shape.gated, old, dtype)
        launch(layer, out[:num_tokens], tile)
        wide = [None if t is None else t.double() for t in (x, weight, shift, norm_weight, old)]
        reference = few_tokens.reference(
            wide[0], wide[1], wide[2], norm_weight=wide[3], eps=1e-5, gated=shape.gated, residual=wide[4]
        )
        assert error(out[:num_tokens], reference) < most_error, num_tokens
        assert (out[num_tokens] == 7.0).all(), "wrote behind the last token"


def check_chain_in_a_graph(launch: Launch, tile: CudaTile, num_tokens: int) -> None:
    """Dependent launch: every kernel reads what the one before it wrote, in every replay."""
    torch.manual_seed(0)
    assert tile.fits(MatrixShape(512, 512))
    weights = [random(512, 512, scale=512**-0.5) for _ in range(24)]
    norm_weight = torch.ones(512, device="cuda", dtype=torch.bfloat16)
    x = random(num_tokens, 512)

    def run() -> Tensor:
        y = x
        for weight in weights:
            out = torch.empty_like(y)
            launch(FusedLayer(y, weight, None, norm_weight, 1e-5, False, y, y.dtype), out, tile)
            y = out
        return y

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for _ in range(20):
        x.copy_(random(num_tokens, 512))
        graph.replay()
        reference = x.double()
        for weight in weights:
            reference = few_tokens.reference(
                reference, weight.double(), norm_weight=norm_weight.double(), eps=1e-5, residual=reference
            )
        assert error(y, reference) < 3e-2
