"""What the rules say for models that no table knows is right: every kernel, and layers in every form."""

import pytest
import torch

pytest.importorskip("triton")

from gpu.linear_layer_checks import error
from gpu.test_wide import attend
from kernels import fused_checks
from ostinato.kernels.cuda import compiled
from ostinato.kernels.gpu import gpu_of
from ostinato.kernels.linear import choice
from ostinato.kernels.linear.rules import HOPPER, tile_by_rule
from ostinato.kernels.linear.tables import Choice, KernelTable
from ostinato.kernels.linear.tiles import FUSED, UNFUSED, Library, MatrixShape
from ostinato.models.config import ModelConfig
from ostinato.models.transformer import Transformer
from ostinato.models.weights import fill_with_random_weights

LAYERS = {
    "Qwen3-4B": [(6144, 2560), (2560, 4096), (9728, 2560, True), (2560, 9728)],
    "Llama-3.2-3B": [(5120, 3072), (3072, 3072), (8192, 3072, True), (3072, 8192)],
    "Qwen2.5-0.5B": [(1152, 896), (896, 896), (4864, 896, True), (896, 4864)],
}
HEAD = MatrixShape(128256, 3072)
TOKENS = (1, 3, 8, 13, 16, 29, 32, 47, 64, 100, 128, 200, 256)


@pytest.mark.parametrize(
    "shape",
    [*(MatrixShape(*sizes) for layer in LAYERS.values() for sizes in layer), HEAD],
    ids=str,
)
def test_every_kernel_by_rule_matches_float64(device, shape):
    tried = set()
    for num_tokens in TOKENS:
        tile = tile_by_rule(shape, num_tokens, gpu_of(device), cuda=compiled.is_supported(device))
        sizes = (num_tokens, shape.out_features, shape.in_features)
        has_norm = shape.gated or shape.out_features > shape.in_features
        form = {"norm": has_norm, "residual": not has_norm, "gated": shape.gated}
        if isinstance(tile, FUSED):
            fused_checks.check_projection(device, torch.bfloat16, sizes, tile, **form)
        elif isinstance(tile, UNFUSED):
            fused_checks.check_product(device, torch.bfloat16, sizes, tile, gated=shape.gated)
        tried.add(type(tile))
    assert tried - {Library}


CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 64, 100, 256, 4096])
@torch.no_grad()
def test_an_untuned_model_is_as_right_as_with_cublas(device, num_tokens):
    """In whatever form the rules make of it."""
    torch.manual_seed(0)
    if gpu_of(device).capability != HOPPER:
        pytest.skip("rules for more than one token are for Hopper")
    config = ModelConfig.from_dict(CONFIG)
    with choice.using(None, package=False):
        model = Transformer(config, device="cuda", dtype=torch.bfloat16)
        fill_with_random_weights(model)
        exact = Transformer(config, device="cuda", dtype=torch.float64)
        exact.load_state_dict(model.state_dict())
        ids = torch.randint(512, (num_tokens,), device="cuda")
        positions = torch.arange(num_tokens, device="cuda")
        wanted = exact(ids, positions, attend)
        by_rules = error(model(ids, positions, attend), wanted)
    cublas = {shape: (Choice(1, 4096, Library()),) for shape in model.matrix_shapes}
    with choice.using(KernelTable("", cublas)):
        plain = Transformer(config, device="cuda", dtype=torch.bfloat16)
        plain.load_state_dict(model.state_dict())
        general = error(plain(ids, positions, attend), wanted)
    assert by_rules < 1.5 * general
