"""`fragments.cu` against float64: every form, every number of tokens, tiles with and without clusters."""

import pytest
import torch

pytest.importorskip("triton")

from gpu.linear_layer_checks import check_chain_in_a_graph, check_layer, random
from ostinato.kernels.cuda import compiled
from ostinato.kernels.linear.cuda_few_tokens import FusedLayer, launch_few_tokens
from ostinato.kernels.linear.tiles import FragmentsTile, MatrixShape

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not compiled.is_supported(torch.device("cuda", 0)),
    reason="needs Hopper and NVRTC",
)

TOKENS = (1, 2, 7, 8, 9, 15, 16)
CASES = [
    (MatrixShape(256, 512), FragmentsTile(32, 1, 8, 4, 160)),
    (MatrixShape(256, 512), FragmentsTile(8, 1, 4, 0, 128)),
    (MatrixShape(192, 1024), FragmentsTile(64, 2, 8, 4, 160)),
    (MatrixShape(96, 2048), FragmentsTile(32, 4, 8, 0, 128)),
    (MatrixShape(128, 3072), FragmentsTile(64, 8, 4, 4, 200)),
    (MatrixShape(72, 512, gated=True), FragmentsTile(24, 1, 8, 2, 160)),
    (MatrixShape(72, 1024, gated=True), FragmentsTile(24, 2, 8, 3, 160)),
    (MatrixShape(12, 256, gated=True), FragmentsTile(12, 1, 8, 3, 160)),
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
    shape, tile = CASES[2]
    weight, norm_weight = random(shape.out_features, shape.in_features), random(shape.in_features)
    x = random(1, shape.in_features).expand(16, -1).contiguous()
    out = torch.empty(16, shape.out_features, device="cuda", dtype=torch.bfloat16)
    launch_few_tokens(FusedLayer(x, weight, None, norm_weight, 1e-5, False, None, out.dtype), out, tile)
    assert (out == out[0]).all()


def test_a_chain_in_a_graph_sees_each_kernels_result():
    check_chain_in_a_graph(launch_few_tokens, FragmentsTile(32, 2, 8, 2, 128), num_tokens=5)


def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_words(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "_FOLDER", tmp_path)
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void broken() { nonsense; }')
    with pytest.raises(compiled.CudaError, match="nonsense"):
        compiled.CudaKernel("broken.cu", "broken", {}).compile((9, 0))


def test_compiled_code_is_found_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "_cache_folder", lambda: tmp_path)
    kernel = compiled.CudaKernel("few_tokens.cu", "project", CONSTANTS)
    first = kernel.compile((9, 0))
    monkeypatch.setattr(compiled, "_compile", None)
    assert kernel.compile((9, 0)) == first
    assert len(list(tmp_path.iterdir())) == 1


CONSTANTS = {
    "IN": 512, "ROWS": 32, "SLICES": 1, "WARPS": 8, "HELD": 4, "REGISTERS": 160, "TOKENS": 8,
    "SHARED_BYTES": 48 << 10, "GATED": 0, "NORM": 0, "BIAS": 0, "RESIDUAL": 0, "OUT_FLOAT": 0,
    "ADAPTED": 0, "STREAMED": 0,
}  # fmt: skip
