"""`gemv.cu` against float64: every form, shapes and tiles as models have them and odd ones."""

import pytest
import torch

pytest.importorskip("triton")

from gpu.linear_layer_checks import check_chain_in_a_graph, check_layer, random
from ostinato.kernels.cuda import compiled
from ostinato.kernels.linear.cuda_few_tokens import FusedLayer, launch_gemv
from ostinato.kernels.linear.tiles import CudaGemvTile, MatrixShape

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not compiled.is_supported(torch.device("cuda", 0)),
    reason="needs Hopper and NVRTC",
)

CASES = [
    (MatrixShape(8, 256), CudaGemvTile(1, 8, 64)),
    (MatrixShape(96, 768), CudaGemvTile(3, 2, 128)),
    (MatrixShape(256, 1024), CudaGemvTile(4, 2, 128)),
    (MatrixShape(128, 3072), CudaGemvTile(4, 2, 255)),
    (MatrixShape(64, 8192), CudaGemvTile(1, 4, 255)),
    (MatrixShape(32, 256), CudaGemvTile(32, 1, 192)),
    (MatrixShape(72, 1024, gated=True), CudaGemvTile(3, 4, 160)),
    (MatrixShape(20, 512, gated=True), CudaGemvTile(5, 1, 160)),
]


@pytest.mark.parametrize(("shape", "tile"), CASES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_form_matches_float64(shape, tile, norm, bias, residual, dtype):
    # Nothing is rounded but sums of float32 and, once, the result.
    most_error = 1e-5 if dtype == torch.float32 else 3e-3
    form = {"norm": norm, "bias": bias, "residual": residual, "dtype": dtype}
    check_layer(launch_gemv, shape, tile, (1,), **form, most_error=most_error)


def test_the_same_token_gives_the_same_bits_every_time():
    torch.manual_seed(0)
    shape, tile = CASES[2]
    weight, norm_weight = random(shape.out_features, shape.in_features), random(shape.in_features)
    x = random(1, shape.in_features)
    out = torch.empty(20, 1, shape.out_features, device="cuda", dtype=torch.bfloat16)
    for row in out:
        launch_gemv(FusedLayer(x, weight, None, norm_weight, 1e-5, False, None, row.dtype), row, tile)
    assert (out == out[0]).all()


def test_a_chain_in_a_graph_sees_each_kernels_result():
    check_chain_in_a_graph(launch_gemv, CudaGemvTile(2, 2, 96), num_tokens=1)
