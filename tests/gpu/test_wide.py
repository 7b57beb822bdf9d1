"""`wide.cu` against float64: tiles with and without clusters, norms left half done, chains in graphs."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gpu.linear_layer_checks import error, random
from ostinato.kernels.cuda import compiled
from ostinato.kernels.linear import choice, few_tokens, scaled_rows
from ostinato.kernels.linear.cuda_wide import launch_wide
from ostinato.kernels.linear.tables import Choice, KernelTable
from ostinato.kernels.linear.tiles import Library, MatrixShape, WideTile
from ostinato.kernels.norms import empty_scaled
from ostinato.models.config import ModelConfig
from ostinato.models.transformer import Transformer
from ostinato.models.weights import fill_with_random_weights

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not compiled.has_warpgroup_products(torch.device("cuda", 0)),
    reason="needs Hopper and NVRTC",
)

CASES = [
    (MatrixShape(256, 1024), WideTile(32, 64, 64, 4, 4)),
    (MatrixShape(256, 1024), WideTile(32, 64, 64, 4, 4, slices=4)),
    (MatrixShape(256, 1024), WideTile(16, 64, 64, 4, 4, slices=4)),
    (MatrixShape(512, 1024), WideTile(32, 128, 128, 2, 2, slices=4)),
    (MatrixShape(1024, 3072), WideTile(32, 64, 64, 6, 6, slices=8)),
    (MatrixShape(1024, 2048), WideTile(64, 64, 128, 4, 4, slices=4)),
    (MatrixShape(512, 1024), WideTile(64, 256, 64, 3, 4)),
    (MatrixShape(256, 1536), WideTile(64, 64, 64, 3, 2, slices=8)),
    (MatrixShape(256, 1024, gated=True), WideTile(32, 32, 128, 4, 4, slices=2)),
    (MatrixShape(512, 1024, gated=True), WideTile(64, 64, 128, 4, 4, slices=2)),
    (MatrixShape(256, 4096, gated=True), WideTile(32, 128, 128, 3, 3)),
]


def token_counts(tile: WideTile) -> tuple[int, ...]:
    """Fewer than a program takes, as many, more."""
    return 1, 5, tile.tokens // 2 + 3, tile.tokens - 1, tile.tokens, tile.tokens + 1, 2 * tile.tokens + 7


@pytest.mark.parametrize(("shape", "tile"), CASES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_product_matches_float64(shape, tile, bias, dtype):
    torch.manual_seed(0)
    assert tile.fits(shape)
    weight = random(shape.out_features * (2 if shape.gated else 1), shape.in_features, scale=0.03)
    shift = random(weight.size(0)) if bias else None
    for num_tokens in token_counts(tile):
        x = random(num_tokens, shape.in_features)
        out = torch.full((num_tokens + 1, shape.out_features), 7.0, device="cuda", dtype=dtype)
        launch_wide(x, weight, shift, out[:num_tokens], tile)
        exact = (None if tensor is None else tensor.double() for tensor in (x, weight, shift))
        wanted = few_tokens.reference(*exact, gated=shape.gated)
        assert error(out[:num_tokens], wanted) < (6e-3 if dtype == torch.bfloat16 else 1e-4), num_tokens
        assert (out[num_tokens] == 7.0).all(), "wrote behind the last token"


def test_rows_of_tokens_may_lie_apart():
    torch.manual_seed(0)
    shape, tile = CASES[5]
    weight, rows = random(shape.out_features, shape.in_features), random(50, 2 * shape.in_features)
    x = rows[:, : shape.in_features]
    apart, dense = (torch.empty(50, shape.out_features, device="cuda").bfloat16() for _ in range(2))
    launch_wide(x, weight, None, apart, tile)
    launch_wide(x.contiguous(), weight, None, dense, tile)
    assert torch.equal(apart, dense)


@pytest.mark.parametrize(("shape", "tile"), CASES, ids=str)
def test_a_norm_may_be_left_half_done(shape, tile):
    """The layer behind it, and the one before it where there is such a one."""
    torch.manual_seed(0)
    weight = random(shape.out_features * (2 if shape.gated else 1), shape.in_features, scale=0.03)
    before, behind = random(shape.in_features), random(shape.out_features)
    for num_tokens in token_counts(tile):
        x = random(num_tokens, shape.in_features, scale=3.0)
        begun = scaled_rows.scale(x, before)
        torch.testing.assert_close(begun.squares, scaled_rows.scale(x.cpu(), before.cpu()).squares.cuda())
        out = torch.empty(num_tokens, shape.out_features, device="cuda", dtype=torch.bfloat16)
        launch_wide(begun.scaled, weight, None, out, tile, squares=begun.squares, eps=1e-5)
        exact = few_tokens.reference(
            x.double(), weight.double(), norm_weight=before.double(), eps=1e-5, gated=shape.gated
        )
        assert error(out, exact) < 6e-3, num_tokens
        if shape.gated:
            continue
        rows = random(num_tokens, shape.out_features)
        exact = few_tokens.reference(x.double(), weight.double(), residual=rows.double())
        scaled, squares = (torch.full_like(t, float("nan")) for t in empty_scaled(rows))
        launch_wide(x, weight, None, rows, tile, norm_weight=behind, scaled=scaled, new_squares=squares)
        assert error(rows, exact) < 6e-3, num_tokens
        assert error(scaled, rows.double() * behind.double()) < 6e-3
        torch.testing.assert_close(squares, scaled_rows.scale(rows, behind).squares)


def test_equal_tokens_give_equal_bits_wherever_they_are():
    torch.manual_seed(0)
    for shape, tile in (CASES[4], CASES[5]):
        weight = random(shape.out_features, shape.in_features)
        x = random(1, shape.in_features).expand(tile.tokens, -1).contiguous()
        out = torch.empty(20, tile.tokens, shape.out_features, device="cuda", dtype=torch.bfloat16)
        for result in out:
            launch_wide(x, weight, None, result, tile)
        assert (out == out[0, 0]).all()


TILES = {
    MatrixShape(512, 256): WideTile(32, 64, 64, 2, 2, slices=2),
    MatrixShape(256, 256): WideTile(32, 64, 64, 2, 2, slices=2),
    MatrixShape(512, 256, gated=True): WideTile(32, 64, 64, 4, 2),
    MatrixShape(256, 512): WideTile(32, 64, 64, 2, 2, slices=4),
}


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every token sees those before it."""
    q, k, v = (heads.transpose(0, 1) for heads in (q, k, v))
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(0, 1)


@pytest.mark.parametrize("num_tokens", [2, 21, 32, 75])
def test_a_model_of_scaled_rows_is_as_right_as_in_general(num_tokens):
    """In a captured graph, against float64; the general form is that of cuBLAS."""
    torch.manual_seed(0)
    config = ModelConfig.from_dict(CONFIG)
    model = Transformer(config, device="cuda", dtype=torch.bfloat16)
    fill_with_random_weights(model)
    for layer in model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.copy_(random(256) + 1)
    exact = Transformer(config, device="cuda", dtype=torch.float64)
    exact.load_state_dict(model.state_dict())
    ids = torch.randint(512, (num_tokens,), device="cuda")
    positions = torch.arange(num_tokens, device="cuda")
    wanted = exact(ids, positions, attend)
    with choice.using(KernelTable("", {shape: (Choice(1, 99, Library()),) for shape in TILES})):
        assert model.form(num_tokens).name == "general"
        general = error(model(ids, positions, attend), wanted)
    table = KernelTable("", {shape: (Choice(1, 99, tile),) for shape, tile in TILES.items()})
    with choice.using(table):
        assert model.form(num_tokens).name == "scaled"
        model(ids, positions, attend)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            hidden = model(ids, positions, attend)
    for _ in range(5):
        hidden.fill_(float("nan"))
        graph.replay()
        assert error(hidden, wanted) < 1.5 * general
