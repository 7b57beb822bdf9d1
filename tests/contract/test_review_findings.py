"""What a careful reader found wrong once, and what must stay right."""

import copy
import gc
import weakref

import pytest
import torch

from contract.steps import WIDTH, key, make_runner, mlp, randn, same, unchanged, x_field
from ostinato.graphs import (
    AddressError,
    BatchShape,
    CaptureOptions,
    CudaGraphRunner,
    Field,
    GraphMode,
    InputBuffers,
    Ladder,
    StaleOutputError,
    capture_keys,
    eager_boundary,
    graphed,
)


def test_rows_per_request_are_told_from_rows_per_token_even_where_rungs_have_as_many_of_both(device):
    fields = [x_field(), Field("last", torch.int64, per="request")]
    keys = capture_keys("full", Ladder([4, 8]), Ladder([4, 8]), max_reqs=8)
    buffers = InputBuffers(fields, max_tokens=8, device=device)
    runner = CudaGraphRunner(lambda x, last: x[last], buffers, keys)
    runner.capture(progress=False)
    batch = {"x": randn(5, WIDTH, device=device), "last": torch.tensor([1, 4], device=device)}
    assert same(runner.run(batch, BatchShape(5, 2)), batch["x"][[1, 4]])


@pytest.mark.parametrize("ladder", [[4], [2, 4]])
def test_an_output_whose_rows_follow_nothing_is_not_served_from_graphs(device, ladder):
    f = graphed(torch.pdist, ladder=ladder)  # a number for every pair of rows
    x = randn(3, WIDTH, device=device)
    assert same(f(x), torch.pdist(x))
    assert f.report().graphs == ()
    assert all("padding cannot be cut off" in cause for cause in f.report().failures.values())


def test_a_constant_output_as_long_as_the_only_rung_is_not_cut(device):
    table = randn(4, device=device)
    f = graphed(lambda x: (x * 2, table + 1), ladder=[4])
    assert same(f(randn(2, WIDTH, device=device))[1], table + 1)


def test_capturing_again_does_not_make_moved_weights_look_right(device):
    model = mlp(device)
    runner = make_runner(device, lambda x: model(x), [2], capture=False)
    runner.watch(model)
    runner.capture(progress=False)
    model[0].weight.data = model[0].weight.data.clone()
    with pytest.raises(AddressError, match=r"0\.weight"):
        runner.capture(progress=False)


def test_a_rung_that_failed_holds_no_memory_while_the_others_are_captured(device):
    tensors, alive = [], []

    def step(x):
        big = x * 2
        if x.size(0) > 2:
            tensors.append(weakref.ref(big))
            raise torch.OutOfMemoryError("no")
        alive.append(sum(ref() is not None for ref in tensors))
        return big

    runner = make_runner(device, step, [1, 2, 4, 8, 16], options=CaptureOptions(), capture=False)
    runner.capture(progress=False)
    assert tensors
    assert set(alive) == {0}
    gc.collect()


def test_what_a_caller_does_to_a_result_does_not_reach_the_next_one(device):
    f = graphed(lambda x: {"y": x * 2}, ladder=[4])
    x = randn(4, WIDTH, device=device)
    f(x)["y"] = None
    assert same(f(x)["y"], x * 2)
    g = graphed(lambda x: x * 2, ladder=[4])
    g(x).unsqueeze_(0)
    assert same(g(x), x * 2)
    assert same(g(x[:3]), x[:3] * 2)


def test_a_boundary_inside_an_autocast_region_is_called_in_it_at_replay(device):
    weight = randn(WIDTH, WIDTH, device=device)
    matmul = eager_boundary(lambda x: x @ weight)

    def step(x):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            y = matmul(x + 1)
        return y.float() * 2

    runner = make_runner(device, step, [4], mode=GraphMode.PIECEWISE)
    x = randn(4, WIDTH, device=device)
    assert same(runner.run({"x": x}), step(x))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert same(runner.run({"x": x}), step(x)), "and outside it is restored"
    assert runner.verify().passed


def test_loading_a_parent_with_assign_and_setting_a_parameter_are_noticed(device):
    parent = torch.nn.ModuleDict({"body": graphed(mlp(device), ladder=[2])})
    x = randn(2, WIDTH, device=device)
    parent["body"](x)
    parent.load_state_dict({k: v.clone() for k, v in parent.state_dict().items()}, assign=True)
    with pytest.raises(AddressError, match="weight"):
        parent["body"](x)
    f = graphed(torch.nn.Linear(WIDTH, WIDTH, device=device), ladder=[2])
    f(x)
    f.weight = torch.nn.Parameter(f.weight.detach().clone())
    with pytest.raises(AddressError, match="weight"):
        f(x)


def test_a_deep_copy_has_graphs_of_its_own(device):
    f = graphed(mlp(device), ladder=[2])
    x = randn(2, WIDTH, device=device)
    before = f(x).clone()
    twin = copy.deepcopy(f)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert same(twin(x), torch.zeros_like(before))
    assert same(f(x), before)


def test_guards_let_static_buffers_be_used_late(device):
    static = torch.zeros(4, WIDTH, device=device)

    def step(x):
        static[: x.size(0)].copy_(x * 2)
        return static[: x.size(0)], x * 3

    runner = make_runner(device, step, [2, 4], results="guarded")
    x = randn(4, WIDTH, device=device)
    lasting, fleeting = runner.run({"x": x})
    runner.run({"x": x})
    assert same(lasting.clone(), x * 2)
    with pytest.raises(StaleOutputError):
        fleeting.clone()


def test_verify_puts_back_what_only_poisoned_padding_writes(device):
    cache = randn(9, WIDTH, device=device)

    def step(x, slot):
        cache.index_copy_(0, slot, x)
        return x * 2

    fields = [x_field(), Field("slot", torch.int64, poison=7)]
    runner = make_runner(device, step, [4], fields=fields)
    batch = lambda shape, generator: {  # noqa: E731
        "x": torch.randn(shape.num_tokens, WIDTH, generator=generator),
        "slot": torch.arange(shape.num_tokens) + 1,
    }
    with unchanged(cache):
        runner.verify(make_batch=batch)


def test_dropping_a_graph_makes_its_outputs_stale_and_the_pool_forget_it(device):
    runner = make_runner(device, lambda x: x * 2, [2], results="guarded")
    out = runner.run({"x": randn(2, WIDTH, device=device)})
    assert len(runner.pool.graphs) == 1
    runner.drop(key(2))
    assert len(runner.pool.graphs) == 0
    with pytest.raises(StaleOutputError):
        out.clone()


def test_a_boundary_result_of_another_shape_is_refused_at_replay(device):
    rows = [2]
    shrink = eager_boundary(lambda x: x[: rows[0]] * 1)
    runner = make_runner(device, lambda x: shrink(x + 1) * 2, [2], mode=GraphMode.PIECEWISE)
    x = randn(2, WIDTH, device=device)
    runner.run({"x": x})
    rows[0] = 1
    with pytest.raises(Exception, match="must keep their type and shape"):
        runner.run({"x": x})


def test_a_users_own_error_that_speaks_of_capturing_stays_what_it_is(device):
    def step(x):
        raise RuntimeError("the camera is not capturing")

    runner = make_runner(device, step, [2], capture=False, options=CaptureOptions(strict=True, warmups=0))
    with pytest.raises(RuntimeError, match="camera") as caught:
        runner.capture(progress=False)
    assert type(caught.value) is RuntimeError


def test_a_refused_batch_in_poison_mode_leaves_the_sink_alone(device):
    sink = torch.zeros(WIDTH, device=device)
    runner = make_runner(device, lambda x: x * 2, [2], sinks={"sink": sink})
    runner.poison = True
    with unchanged(sink), pytest.raises(ValueError):
        runner.run({"x": torch.zeros(1, WIDTH + 1, device=device)})


def test_a_graphed_function_inside_a_runners_step_is_part_of_its_graph(device):
    inner = graphed(lambda x: x + 1, ladder=[2])
    runner = make_runner(device, lambda x: inner(x) * 2, [2])
    assert inner.report().graphs == ()
    x = randn(2, WIDTH, device=device)
    assert same(runner.run({"x": x}), (x + 1) * 2)


def test_conjugated_outputs_keep_their_meaning(device):
    f = graphed(lambda x: torch.view_as_complex(x).conj(), ladder=[2])
    x = randn(2, WIDTH, 2, device=device)
    expected = torch.view_as_complex(x).conj().resolve_conj()
    assert same(torch.view_as_real(f(x).resolve_conj()), torch.view_as_real(expected))
