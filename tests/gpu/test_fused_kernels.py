"""The fused kernels on the GPU, at the shapes of real models and at odd ones."""

import pytest
import torch

from kernels import fused_checks
from ostinato.graphs import CaptureOptions, graphed
from ostinato.kernels.cuda import compiled
from ostinato.kernels.gpu import Gpu, gpu_of
from ostinato.kernels.linear import choice, products
from ostinato.kernels.linear.rules import gemv_tile
from ostinato.kernels.linear.tiles import (
    FUSED,
    IN_CUDA,
    CudaGemvTile,
    MatrixShape,
    SkinnyTile,
    Tile,
    WideTile,
)
from ostinato.kernels.linear.weight import Weight
from ostinato.kernels.norms import rows

# (query heads, KV heads, head size), as in Qwen3-0.6B, Llama-3.2-1B, Qwen2-0.5B, Phi-2, Phi-3-mini.
QWEN3, LLAMA, QWEN2, PHI2, PHI3 = (16, 8, 128), (32, 8, 64), (14, 2, 64), (32, 32, 80), (32, 32, 96)
DECODE = [(1, 1), (17, 1), (256, 1), (257, 1), (1000, 1), (2049, 1), (4096, 1)]
H200 = choice.package_table(Gpu((9, 0), 132))
MIXED = [(1500, 1), (700, 200), (64, 64), (33, 1), (90, 0), (513, 2)]


def _of_kind(*kinds: type[Tile]) -> list[tuple[MatrixShape, Tile]]:
    """Every tile of the committed table, with the smallest matrix that has it."""
    assert H200 is not None
    smallest_first = sorted(H200.choices, key=lambda shape: shape.out_features * shape.in_features)
    found: dict[Tile, MatrixShape] = {}
    for shape in smallest_first:
        for entry in H200.choices[shape]:
            if isinstance(entry.tile, kinds):
                found.setdefault(entry.tile, shape)
    return [(shape, tile) for tile, shape in found.items()]


@pytest.mark.parametrize("num_requests", [1, 7, 40, 70])
@pytest.mark.parametrize(
    ("heads", "norm", "dtype", "window"),
    [
        (QWEN3, True, torch.bfloat16, None),
        (LLAMA, False, torch.bfloat16, 100),
        (QWEN2, False, torch.float16, None),
        (PHI2, True, torch.bfloat16, None),
        (PHI3, False, torch.float32, 33),
    ],
    ids=str,
)
def test_decode_from_projected_rows(device, num_requests, heads, norm, dtype, window):
    """Every range of batch sizes has a tile of its own."""
    requests = [DECODE[index % len(DECODE)] for index in range(num_requests)]
    fused_checks.check_attend_qkv(device, dtype, requests, heads, norm=norm, max_query_len=1, window=window)


@pytest.mark.parametrize(
    ("heads", "norm", "dtype", "window"),
    [
        (QWEN3, True, torch.bfloat16, None),
        (LLAMA, False, torch.bfloat16, 100),
        (PHI3, True, torch.float32, None),
    ],
    ids=str,
)
def test_mixed_batches_from_projected_rows(device, heads, norm, dtype, window):
    fused_checks.check_attend_qkv(device, dtype, MIXED, heads, norm=norm, max_query_len=256, window=window)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "flags",
    [{"norm": True}, {"norm": True, "gated": True}, {"residual": True}, {"norm": True, "bias": True}],
    ids=str,
)
@pytest.mark.parametrize("size", [(4096, 1024), (1024, 3072), (49, 576), (100, 4864), (130, 14336)], ids=str)
def test_projections(device, dtype, flags, size):
    tile = gemv_tile(MatrixShape(*size), gpu_of(device))
    fused_checks.check_projection(device, dtype, (1, *size), tile, **flags)


@pytest.mark.parametrize(("shape", "tile"), _of_kind(*(kind for kind in IN_CUDA if kind in FUSED)), ids=str)
def test_projections_by_cuda_kernels(device, shape, tile):
    if not compiled.is_supported(device):
        pytest.skip("needs Hopper and NVRTC")
    is_wider = shape.in_features <= shape.out_features  # than its input: such a matrix follows a norm
    flags = {"norm": True, "gated": shape.gated} if is_wider else {"residual": True}
    for num_tokens in (1,) if isinstance(tile, CudaGemvTile) else (2, 16):
        sizes = (num_tokens, shape.out_features, shape.in_features)
        fused_checks.check_projection(device, torch.bfloat16, sizes, tile, **flags)


@pytest.mark.parametrize(("shape", "tile"), _of_kind(SkinnyTile, WideTile), ids=str)
def test_products_of_some_tokens(device, shape, tile):
    """Each tile of the table once, with tokens that are no multiple of it."""
    for num_tokens in (3, tile.tokens + 3):
        sizes = (num_tokens, shape.out_features, shape.in_features)
        fused_checks.check_product(device, torch.bfloat16, sizes, tile, gated=shape.gated)


@pytest.mark.parametrize(
    ("size", "tile"),
    [
        ((100, 1000, 3000), SkinnyTile(64, 128, 64, 8, 3, parts=2)),
        ((27, 200, 1000), SkinnyTile(32, 64, 128, 4, 3, parts=4)),
        ((19, 333, 1000), SkinnyTile(16, 64, 64, 4, 3)),
        ((300, 129, 520), SkinnyTile(128, 64, 64, 8, 3)),
    ],
    ids=str,
)
def test_products_that_no_tile_divides(device, size, tile):
    fused_checks.check_product(device, torch.bfloat16, size, tile, bias=True)
    if tile.parts == 1:
        fused_checks.check_product(device, torch.bfloat16, size, tile, gated=True, bias=True)


@pytest.mark.parametrize("num_rows", [1, 8, 300])
def test_logits_are_float32_whoever_makes_them(device, num_rows):
    generator = torch.Generator(device).manual_seed(1)
    hidden, weight = (
        torch.randn(count, 1024, generator=generator, device=device).bfloat16() for count in (num_rows, 5000)
    )
    wanted = hidden.double() @ weight.double().T
    out = torch.full((num_rows, 5000), float("nan"), device=device)
    assert products.float_linear(hidden, Weight(weight), out) is out
    torch.testing.assert_close(out.double(), wanted, atol=1e-3, rtol=1e-4)
    assert torch.equal(products.float_linear(hidden, Weight(weight)), out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1024), (37, 576), (300, 4096)])
def test_rows(device, dtype, num_tokens, width):
    fused_checks.check_rows(device, dtype, num_tokens, width)


def test_row_kernels_in_a_graph(device):
    """Dependent launches are part of a captured graph and order what they must."""
    width = 1024
    weight = torch.rand(width, device=device, dtype=torch.bfloat16)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            gated = rows.silu_mul(torch.cat([x, x], dim=1)).contiguous()
            x, _ = rows.add_rms_norm(gated, x.clone(), weight, 1e-6)
        return x

    x = torch.randn(32, width, device=device, dtype=torch.bfloat16)
    function = graphed(chain, ladder=[32], options=CaptureOptions(strict=True))
    for _ in range(3):
        assert torch.equal(function(x), chain(x))
    assert not function.report().eager_steps
