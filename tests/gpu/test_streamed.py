"""`streamed.cu` against float64: every form, tiles with and without clusters and shared columns."""

import pytest
import torch

pytest.importorskip("triton")

from gpu.linear_layer_checks import check_chain_in_a_graph, check_layer, random
from ostinato.kernels.cuda import compiled
from ostinato.kernels.linear.cuda_few_tokens import FusedLayer, launch_few_tokens
from ostinato.kernels.linear.tiles import MatrixShape, StreamedTile

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not compiled.is_supported(torch.device("cuda", 0)),
    reason="needs Hopper and NVRTC",
)

TOKENS = (1, 2, 7, 8, 9, 15, 16)
CASES = [
    (MatrixShape(256, 512), StreamedTile(32, 1, 1, 128, 3, 8, 112)),
    (MatrixShape(64, 1024), StreamedTile(16, 1, 8, 64, 2, 2, 112)),
    (MatrixShape(192, 2048), StreamedTile(64, 8, 1, 128, 2, 4, 112)),
    (MatrixShape(128, 14336), StreamedTile(64, 8, 2, 128, 3, 6, 112)),
    (MatrixShape(128, 9728), StreamedTile(64, 8, 1, 64, 5, 8, 96)),
    (MatrixShape(96, 4096), StreamedTile(48, 4, 2, 128, 2, 3, 112)),
    (MatrixShape(112, 1024, gated=True), StreamedTile(56, 1, 1, 128, 3, 8, 112)),
    (MatrixShape(64, 2048, gated=True), StreamedTile(32, 2, 1, 256, 2, 8, 112)),
    (MatrixShape(96, 1024, gated=True), StreamedTile(24, 1, 2, 64, 4, 5, 112)),
]


@pytest.mark.parametrize(("shape", "tile"), CASES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_form_matches_float64(shape, tile, norm, bias, residual, dtype):
    form = {"norm": norm, "bias": bias, "residual": residual, "dtype": dtype}
    check_layer(launch_few_tokens, shape, tile, TOKENS, **form, most_error=6e-3)


def test_equal_tokens_give_equal_bits_wherever_they_are():
    torch.manual_seed(0)
    shape, tile = CASES[3]
    weight, norm_weight = random(shape.out_features, shape.in_features), random(shape.in_features)
    x = random(1, shape.in_features).expand(16, -1).contiguous()
    out = torch.empty(20, 16, shape.out_features, device="cuda", dtype=torch.bfloat16)
    for result in out:
        launch_few_tokens(
            FusedLayer(x, weight, None, norm_weight, 1e-5, False, None, result.dtype), result, tile
        )
    assert (out == out[0, 0]).all()


def test_a_chain_in_a_graph_sees_each_kernels_result():
    check_chain_in_a_graph(launch_few_tokens, StreamedTile(64, 4, 1, 64, 3, 4, 96), num_tokens=5)
