"""Steps of every form with weights in an arena, and with adapters, in captured graphs."""

import pytest
import torch

pytest.importorskip("triton")

from gpu.linear_layer_checks import error
from gpu.test_wide import CONFIG, attend
from models.arena import Arena
from models.test_launches import TABLE
from ostinato.kernels.cuda import compiled
from ostinato.kernels.linear import choice
from ostinato.models.config import ModelConfig
from ostinato.models.layers import Linear
from ostinato.models.transformer import Transformer
from ostinato.models.weights import fill_with_random_weights

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not compiled.has_warpgroup_products(torch.device("cuda", 0)),
    reason="needs Hopper and NVRTC",
)
FORMS = {1: "few", 8: "few", 9: "scaled", 32: "scaled", 40: "general", 100: "general"}


@pytest.fixture(autouse=True)
def _table():
    with choice.using(TABLE):
        yield


def captured(model, num_tokens, *more):
    """Hidden states of a replayed step."""
    ids, positions = (torch.arange(num_tokens, device="cuda") for _ in range(2))
    model(ids, positions, attend, *more)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = model(ids, positions, attend, *more)
    hidden.fill_(float("nan"))
    graph.replay()
    return hidden


@pytest.mark.parametrize("num_tokens", FORMS)
def test_weights_in_an_arena_give_the_same_bits(num_tokens):
    config = ModelConfig.from_dict(CONFIG)
    arena = Arena(32 << 20, "cuda")
    plain, placed = (
        Transformer(config, device="cuda", dtype=torch.bfloat16, allocate=allocate)
        for allocate in (None, arena.allocate)
    )
    for model in (plain, placed):
        fill_with_random_weights(model)
    assert all(map(arena.holds, placed.parameters()))
    assert placed.form(num_tokens).name == FORMS[num_tokens]
    assert torch.equal(captured(plain, num_tokens), captured(placed, num_tokens))


@pytest.mark.parametrize("num_tokens", FORMS)
def test_adapters_are_as_right_as_merged_weights(num_tokens):
    """Against float64, with products in parts among those of 40 tokens."""
    torch.manual_seed(0)
    config = ModelConfig.from_dict(CONFIG)
    model, merged = (Transformer(config, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    exact = Transformer(config, device="cuda", dtype=torch.float64)
    fill_with_random_weights(model)
    exact.load_state_dict(model.state_dict())
    factors = {}
    for name, module in exact.layers.named_modules():
        if isinstance(module, Linear):
            rows, columns = module.weight.shape
            down = torch.randn(columns, 4, device="cuda").bfloat16() / columns**0.5
            up = torch.randn(4, rows, device="cuda").bfloat16() / 4
            factors[f"layers.{name}"] = down, up
            module.weight += (down.double() @ up.double()).T
    merged.load_state_dict(exact.state_dict())

    def deltas(name, x, product):
        down, up = factors[name]
        product += x @ down @ up

    ids = torch.arange(num_tokens, device="cuda")
    wanted = exact(ids, ids, attend)
    assert model.form(num_tokens, deltas).name == "general"
    without, found, by_weights = (
        error(hidden, wanted)
        for hidden in (
            captured(model, num_tokens),
            captured(model, num_tokens, deltas),
            captured(merged, num_tokens),
        )
    )
    assert found < 2 * by_weights < without / 5, "adapters that change nothing prove nothing"
