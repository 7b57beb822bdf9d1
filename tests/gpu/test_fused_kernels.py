"""The fused kernels on the GPU, at the shapes of real models and at odd ones."""

import pytest
import torch

from kernels import fused_checks
from ostinato.graphs import CaptureOptions, graphed
from ostinato.kernels import rows
from ostinato.kernels.linear import tiles

# (query heads, KV heads, head size), as in Qwen3-0.6B, Llama-3.2-1B, Qwen2-0.5B, Phi-2, Phi-3-mini.
QWEN3, LLAMA, QWEN2, PHI2, PHI3 = (16, 8, 128), (32, 8, 64), (14, 2, 64), (32, 32, 80), (32, 32, 96)
DECODE = [(1, 1), (17, 1), (256, 1), (257, 1), (1000, 1), (2049, 1), (4096, 1)]
MIXED = [(1500, 1), (700, 200), (64, 64), (33, 1), (90, 0), (513, 2)]


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
    fused_checks.check_attend_rows(device, dtype, requests, heads, norm=norm, max_query_len=1, window=window)


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
    fused_checks.check_attend_rows(device, dtype, MIXED, heads, norm=norm, max_query_len=256, window=window)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "flags",
    [{"norm": True}, {"norm": True, "gated": True}, {"residual": True}, {"norm": True, "bias": True}],
    ids=str,
)
@pytest.mark.parametrize("size", [(4096, 1024), (1024, 3072), (49, 576), (100, 4864), (130, 14336)], ids=str)
def test_projections(device, dtype, flags, size):
    fused_checks.check_projection(device, dtype, (1, *size), **flags)


@pytest.mark.parametrize("num_tokens", [2, 16])
@pytest.mark.parametrize("shape", list(tiles._RESIDENT), ids=str)
def test_projections_of_a_few_tokens(device, shape, num_tokens):
    sizes = (num_tokens, shape.out_features, shape.in_features)
    flags = {"norm": True, "gated": shape.gated} if shape.in_features == 1024 else {"residual": True}
    fused_checks.check_projection(device, torch.bfloat16, sizes, **flags)


@pytest.mark.parametrize("num_tokens", [17, 64, 100])
@pytest.mark.parametrize("shape", list(tiles._SKINNY), ids=str)
def test_products_of_some_tokens(device, shape, num_tokens):
    sizes = (num_tokens, shape.out_features, shape.in_features)
    fused_checks.check_skinny(device, torch.bfloat16, sizes, gated=shape.gated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1024), (37, 576), (300, 4096)])
def test_rows(device, dtype, num_tokens, width):
    fused_checks.check_rows(device, dtype, num_tokens, width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [500, 49_152, 151_936])
def test_argmax(device, dtype, width):
    fused_checks.check_argmax(device, dtype, width)


def test_row_kernels_in_a_graph(device):
    """Dependent launches are part of a captured graph and order what they must."""
    width = 1024
    weight = torch.rand(width, device=device, dtype=torch.bfloat16)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x, _ = rows.add_rms_norm(rows.silu_mul(torch.cat([x, x], dim=1)), x, weight, 1e-6)
        return x

    x = torch.randn(32, width, device=device, dtype=torch.bfloat16)
    function = graphed(chain, ladder=[32], options=CaptureOptions(strict=True))
    for _ in range(3):
        assert torch.equal(function(x), chain(x))
    assert not function.report().eager_steps
