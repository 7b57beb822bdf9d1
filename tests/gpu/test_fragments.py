"""`fragments.cu` against float64: every form, every number of tokens, tiles with and without clusters."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ostinato.kernels.cuda import compiled
from ostinato.kernels.linear import few_tokens
from ostinato.kernels.linear.cuda_fragments import launch_fragments
from ostinato.kernels.linear.tiles import FragmentsTile, MatrixShape

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not compiled.is_supported(torch.device("cuda", 0)),
    reason="needs Hopper and NVRTC",
)

TOKENS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100)
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


def random(*shape: int, scale: float = 1.0) -> Tensor:
    """Bfloat16 on the GPU."""
    return (torch.randn(shape, device="cuda") * scale).bfloat16()


def error(y: Tensor, reference: Tensor) -> float:
    """Relative, over all of it; NaN is larger than everything."""
    distance = ((y.double() - reference).norm() / reference.norm()).item()
    return distance if distance == distance else float("inf")


@pytest.mark.parametrize(("shape", "tile"), CASES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_form_matches_float64(shape, tile, norm, bias, residual, dtype):
    torch.manual_seed(0)
    assert tile.fits(shape)
    width = shape.in_features
    weight = random(shape.out_features * (2 if shape.gated else 1), width, scale=width**-0.5)
    shift = random(weight.size(0)) if bias else None
    norm_weight = random(width) if norm else None
    for num_tokens in TOKENS:
        x = random(num_tokens, width, scale=3.0)
        old = random(num_tokens, shape.out_features) if residual else None
        out = torch.full((num_tokens + 1, shape.out_features), 7.0, device="cuda", dtype=dtype)
        launch_fragments(x, weight, shift, norm_weight, 1e-5, old, out[:num_tokens], tile)
        wide = [None if t is None else t.double() for t in (x, weight, shift, norm_weight, old)]
        reference = few_tokens.reference(
            wide[0], wide[1], wide[2], norm_weight=wide[3], eps=1e-5, gated=shape.gated, residual=wide[4]
        )
        assert error(out[:num_tokens], reference) < 6e-3, num_tokens
        assert (out[num_tokens] == 7.0).all(), "wrote behind the last token"


def test_equal_tokens_give_equal_bits_wherever_they_are():
    torch.manual_seed(0)
    shape, tile = CASES[2]
    weight, norm_weight = random(shape.out_features, shape.in_features), random(shape.in_features)
    x = random(1, shape.in_features).expand(32, -1).contiguous()
    out = torch.empty(32, shape.out_features, device="cuda", dtype=torch.bfloat16)
    launch_fragments(x, weight, None, norm_weight, 1e-5, None, out, tile)
    assert (out == out[0]).all()


def test_a_chain_in_a_graph_sees_each_kernels_result():
    """Dependent launch: every kernel reads what the one before it wrote, in every replay."""
    torch.manual_seed(0)
    shape, tile = MatrixShape(512, 512), FragmentsTile(32, 2, 8, 2, 128)
    weights = [random(512, 512, scale=512**-0.5) for _ in range(24)]
    norm_weight = torch.ones(512, device="cuda", dtype=torch.bfloat16)
    x = random(5, 512)

    def run() -> Tensor:
        y = x
        for weight in weights:
            out = torch.empty_like(y)
            launch_fragments(y, weight, None, norm_weight, 1e-5, y, out, tile)
            y = out
        return y

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for _ in range(20):
        x.copy_(random(5, 512))
        graph.replay()
        reference = x.double()
        for weight in weights:
            reference = few_tokens.reference(
                reference, weight.double(), norm_weight=norm_weight.double(), eps=1e-5, residual=reference
            )
        assert error(y, reference) < 3e-2
    assert tile.fits(shape)


def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_words(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "_FOLDER", tmp_path)
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void broken() { nonsense; }')
    with pytest.raises(compiled.CudaError, match="nonsense"):
        compiled.CudaKernel("broken.cu", "broken", {}).compile((9, 0))


def test_compiled_code_is_found_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "_cache_folder", lambda: tmp_path)
    kernel = compiled.CudaKernel("fragments.cu", "project", CONSTANTS)
    first = kernel.compile((9, 0))
    monkeypatch.setattr(compiled, "_compile", None)
    assert kernel.compile((9, 0)) == first
    assert len(list(tmp_path.iterdir())) == 1


CONSTANTS = {
    "IN": 512, "ROWS": 32, "SLICES": 1, "WARPS": 8, "HELD": 4, "REGISTERS": 160, "TOKENS": 8,
    "SHARED_BYTES": 48 << 10, "GATED": 0, "NORM": 0, "BIAS": 0, "RESIDUAL": 0, "OUT_FLOAT": 0,
}  # fmt: skip
