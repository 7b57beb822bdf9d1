"""Clause 1: a graph reads fixed addresses; whatever moves is named."""

import pytest
import torch

from contract.steps import WIDTH, eager_padded, make_runner, mlp, randn, same
from ostinato.graphs import AddressError, InputBuffers, graphed


def moved(parameter: torch.nn.Parameter) -> None:
    """Give a parameter new memory behind everyone's back, as many weight loaders do."""
    parameter.data = parameter.data.clone()


def test_a_moved_parameter_is_named_by_check_addresses(device):
    model = mlp(device)
    runner = make_runner(device, lambda x: model(x), [2, 4])
    runner.watch(model)
    runner.check_addresses()
    moved(model[2].weight)
    with pytest.raises(AddressError, match=r"2\.weight") as caught:
        runner.check_addresses()
    assert "0.weight" not in str(caught.value)


def test_only_debug_mode_checks_before_every_replay(device):
    model = mlp(device)
    batch = {"x": randn(2, WIDTH, device=device)}
    debugging, plain = (make_runner(device, lambda x: model(x), [2], debug=on) for on in (True, False))
    for runner in (debugging, plain):
        runner.watch(model)
        runner.run(batch)
    moved(model[0].bias)
    generation = debugging.pool.generation
    with pytest.raises(AddressError, match=r"0\.bias"):
        debugging.run(batch)
    assert debugging.pool.generation == generation, "the graph was launched all the same"
    plain.run(batch)


def test_a_graph_goes_on_reading_the_memory_a_parameter_has_left(device):
    model = mlp(device)
    runner = make_runner(device, lambda x: model(x), [2])
    batch = {"x": randn(2, WIDTH, device=device)}
    before = runner.run(batch).clone()
    kept_alive = model[2].weight.data
    moved(model[2].weight)
    with torch.no_grad():
        model[2].weight.mul_(2)
    assert same(runner.run(batch), before)
    assert kept_alive.data_ptr() != model[2].weight.data_ptr()


def test_an_update_in_place_reaches_the_graph_and_raises_nothing(device):
    model = mlp(device)
    runner = make_runner(device, lambda x: model(x), [2], debug=True)
    runner.watch(model)
    batch = {"x": randn(2, WIDTH, device=device)}
    before = runner.run(batch).clone()
    with torch.no_grad():
        model[2].weight.copy_(model[2].weight * 3)
    after = runner.run(batch).clone()
    assert not same(after, before)
    assert same(after, eager_padded(runner, batch))


def test_a_replaced_cache_is_named_and_a_removed_one_is_called_gone(device):
    caches = {
        "k_cache": torch.zeros(4, WIDTH, device=device),
        "v_cache": torch.zeros(4, WIDTH, device=device),
    }
    k_cache = caches["k_cache"]
    runner = make_runner(device, lambda x: x + k_cache[0], [2])
    runner.watch(lambda: caches)
    caches["k_cache"] = k_cache.clone()
    with pytest.raises(AddressError, match="k_cache"):
        runner.check_addresses()
    caches["k_cache"] = k_cache
    runner.check_addresses()
    del caches["v_cache"]
    with pytest.raises(AddressError, match=r"v_cache.*gone"):
        runner.check_addresses()


def test_a_replaced_module_buffer_is_named(device):
    model = mlp(device)
    model.register_buffer("table", torch.ones(WIDTH, device=device))
    runner = make_runner(device, lambda x: model(x) * model.table, [2])
    runner.watch(model)
    model.table = torch.ones(WIDTH, device=device)
    with pytest.raises(AddressError, match="table"):
        runner.check_addresses()


def test_a_mapping_of_tensors_can_be_watched_as_it_is(device):
    table = torch.ones(WIDTH, device=device)
    runner = make_runner(device, lambda x: x * table, [2])
    runner.watch({"table": table})
    runner.check_addresses()
    table.data = table.data.clone()
    with pytest.raises(AddressError, match="table"):
        runner.check_addresses()


def test_replaced_input_buffers_are_noticed(device):
    runner = make_runner(device, lambda x: x * 2, [2])
    old = runner.buffers
    runner.buffers = InputBuffers(old.fields, max_tokens=2, device=device)
    with pytest.raises(AddressError, match="input x"):
        runner.check_addresses()


def test_a_new_capture_takes_the_present_addresses_as_right(device):
    model = mlp(device)
    runner = make_runner(device, lambda x: model(x), [2])
    runner.watch(model)
    moved(model[0].weight)
    with torch.no_grad():
        model[0].weight.mul_(2)
    runner.drop()
    runner.capture(progress=False)
    runner.check_addresses()
    batch = {"x": randn(2, WIDTH, device=device)}
    assert same(runner.run(batch), eager_padded(runner, batch))


@pytest.mark.parametrize("move", ["to", "load_state_dict"])
def test_a_graphed_module_refuses_to_replay_after_its_weights_were_moved(device, move):
    f = graphed(mlp(device), ladder=[2, 4])
    x = randn(3, WIDTH, device=device)
    f(x)
    if move == "to":
        f.to(torch.float64)
        f.to(torch.float32)
    else:
        state = {name: tensor.clone() * 2 for name, tensor in f.state_dict().items()}
        f.load_state_dict(state, assign=True)
    for _ in range(2):  # and says so each time, not only once
        with pytest.raises(AddressError, match=r"0\.weight"):
            f(x)
    f.recapture()
    assert same(f(x), f.unwrap()(torch.cat([x, torch.zeros_like(x[:1])]))[:3])


def test_a_graphed_module_goes_on_after_a_load_or_to_that_moves_nothing(device):
    f = graphed(mlp(device), ladder=[4])
    x = randn(4, WIDTH, device=device)
    before = f(x).clone()
    f.to(device)
    assert same(f(x), before)
    f.load_state_dict({name: tensor.clone() * 2 for name, tensor in f.state_dict().items()})
    after = f(x).clone()
    assert not same(after, before)
    assert same(after, f.unwrap()(x))
    assert f.report().replays == 3


def test_weights_moved_through_the_module_around_are_noticed(device):
    outer = torch.nn.Sequential(graphed(mlp(device), ladder=[2]))
    x = randn(2, WIDTH, device=device)
    outer(x)
    outer.double().float()
    with pytest.raises(AddressError, match="weight"):
        outer(x)


def test_a_parameter_set_through_the_wrapper_is_found_by_check_addresses(device):
    f = graphed(mlp(device), ladder=[2])
    f(randn(2, WIDTH, device=device))
    f.check_addresses()
    f.get_submodule("0").weight = torch.nn.Parameter(f.get_submodule("0").weight.detach().clone())
    with pytest.raises(AddressError, match=r"0\.weight"):
        f.check_addresses()


def test_every_signature_is_checked_after_weights_moved_not_only_the_first_one_called(device):
    f = graphed(mlp(device), ladder=[2])
    old, new = randn(2, WIDTH, device=device), randn(2, 3, WIDTH, device=device)
    f.capture(old)
    f.double().float()
    with torch.no_grad():
        f.get_submodule("0").weight.mul_(2)
    f.capture(new)
    f(new)  # captured after the move: its addresses are right
    with pytest.raises(AddressError, match=r"0\.weight"):
        f(old)  # captured before
