"""Steps of every form with weights in an arena, and with adapters, in captured graphs."""

import pytest
import torch

pytest.importorskip("triton")

from gpu.linear_layer_checks import error
from gpu.test_wide import CONFIG, attend
from models.arena import Arena
from models.random_adapters import RandomAdapters, attend_alone
from models.test_launches import TABLE
from ostinato.kernels.cuda import compiled
from ostinato.kernels.linear import choice
from ostinato.models.config import ModelConfig
from ostinato.models.transformer import Transformer
from ostinato.models.weights import fill_with_random_weights

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not compiled.has_warpgroup_products(torch.device("cuda", 0)),
    reason="needs Hopper and NVRTC",
)
FORMS = {1: "few", 8: "few", 9: "scaled", 32: "scaled", 40: "general", 100: "general", 200: "general"}


@pytest.fixture(autouse=True)
def _table():
    with choice.using(TABLE):
        yield


def captured(model, num_tokens, slots=None, adapters=None, attend=attend):
    """Hidden states of a replayed step, perhaps with adapters for tokens with these slots."""
    ids, positions = (torch.arange(num_tokens, device="cuda") for _ in range(2))

    def step():
        return model(ids, positions, attend, adapters and adapters.for_tokens(slots))

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = step()
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
    """Three adapters and none in one step, against float64; 40 tokens have products in parts."""
    torch.manual_seed(0)
    config = ModelConfig.from_dict(CONFIG)
    model = Transformer(config, device="cuda", dtype=torch.bfloat16)
    fill_with_random_weights(model)
    adapters = RandomAdapters(model, size=0.25)
    ids = torch.arange(num_tokens, device="cuda")
    assert model.form(num_tokens, adapters.for_tokens(ids.int() * 0)).name == FORMS[num_tokens]
    without = captured(model, num_tokens, attend=attend_alone)
    for first in range(4) if num_tokens == 1 else (0,):
        slots = (ids.int() + first) % 4 - 1
        found = captured(model, num_tokens, slots, adapters, attend=attend_alone)
        assert torch.equal(found[slots < 0], without[slots < 0]), "the bits of a step without adapters"
        for slot in set(slots.tolist()) - {-1}:
            exact, merged = (
                Transformer(config, device="cuda", dtype=dtype) for dtype in (torch.float64, torch.bfloat16)
            )
            exact.load_state_dict(model.state_dict())
            adapters.merge_into(exact, slot)
            merged.load_state_dict(exact.state_dict())
            wanted = exact(ids, ids, attend_alone)[slots == slot]
            by_weights = error(captured(merged, num_tokens, attend=attend_alone)[slots == slot], wanted)
            assert error(found[slots == slot], wanted) < 2 * by_weights
            if slot < 2:
                assert by_weights < error(without[slots == slot], wanted) / 5, "it changes nothing"


def test_a_slot_that_is_rewritten_changes_the_next_replay():
    torch.manual_seed(0)
    model = Transformer(ModelConfig.from_dict(CONFIG), device="cuda", dtype=torch.bfloat16)
    fill_with_random_weights(model)
    adapters = RandomAdapters(model)
    slots = torch.zeros(8, dtype=torch.int32, device="cuda")
    ids = torch.arange(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    model(ids, ids, attend_alone, adapters.for_tokens(slots))
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        hidden = model(ids, ids, attend_alone, adapters.for_tokens(slots))
    graph.replay()
    first = hidden.clone()
    for stack in adapters.stacks.values():
        stack.clear(0)
    graph.replay()
    assert not torch.equal(hidden, first)
    assert torch.equal(hidden, captured(model, 8, attend=attend_alone))
    slots.fill_(1)
    graph.replay()
    eager = model(ids, ids, attend_alone, adapters.for_tokens(slots))
    assert torch.equal(hidden, eager)
