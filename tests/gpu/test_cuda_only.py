"""What only a GPU has: streams, Triton and compiled kernels, real memory limits, raw graphs, NCCL."""

import gc
import threading

import pytest
import torch

from contract.steps import (
    WIDTH,
    CallCounter,
    close,
    eager_padded,
    key,
    make_runner,
    mlp,
    randn,
    same,
    unchanged,
    x_field,
)
from ostinato.graphs import (
    CaptureError,
    CaptureOptions,
    ConfigError,
    Field,
    GraphMode,
    GraphPool,
    Reason,
    eager_boundary,
    graphed,
)

MODES = [GraphMode.FULL, GraphMode.PIECEWISE]


def works(device):
    assert torch.rand(3, device=device).isfinite().all()
    torch.cuda.empty_cache()
    runner = make_runner(device, lambda x: torch.nn.functional.dropout(x, 0.5), [2])
    batch = {"x": torch.ones(2, WIDTH, device=device)}
    return not same(runner.run(batch).clone(), runner.run(batch).clone())


# -- one stream ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_replays_issued_from_two_streams_are_ordered(device, mode):
    size = 512
    weight = randn(size, size, device=device) / size**0.5

    def step(x):
        for _ in range(20):
            x = torch.tanh(x @ weight)
        return x

    runner = make_runner(device, step, [64, 256], fields=[x_field(width=size)], mode=mode)
    batches = [{"x": randn(n, size, device=device, seed=n)} for n in (256, 64, 200, 40, 256, 10)]
    wanted = [eager_padded(runner, batch)[: batch["x"].size(0)].clone() for batch in batches]
    streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]
    torch.cuda.synchronize()
    for _ in range(10):
        got = []
        for number, batch in enumerate(batches):
            with torch.cuda.stream(streams[number % 2]):
                got.append(runner.run(batch).clone())
        torch.cuda.synchronize()
        assert close(got, wanted, 1e-4)


def test_a_capture_waits_for_the_work_of_the_callers_stream(device):
    side = torch.cuda.Stream(device)
    weight = torch.zeros(WIDTH, device=device)
    busy = randn(4096, 4096, device=device)
    with torch.cuda.stream(side):
        for _ in range(20):
            busy = (busy @ busy) * 1e-3
        weight.fill_(3)
        f = graphed(lambda x: x * weight, ladder=[2])
        x = torch.ones(2, WIDTH, device=device)
        out = f(x).clone()
    side.synchronize()
    assert (out == 3).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_step_may_fork_to_a_side_stream_and_join_it(device, mode):
    side = torch.cuda.Stream(device)
    weight = randn(512, 512, device=device) * 0.05

    def step(x):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            beside = x
            for _ in range(20):
                beside = torch.tanh(beside @ weight)
            beside.record_stream(main)
        here = torch.tanh(x @ weight.T)
        main.wait_stream(side)
        return here + beside

    runner = make_runner(device, step, [8, 64], fields=[x_field(width=512)], mode=mode)
    for n in (64, 5, 40, 8):
        batch = {"x": randn(n, 512, device=device, seed=n)}
        assert close(runner.run(batch), eager_padded(runner, batch)[:n], 1e-4)
    assert runner.verify(tolerance=1e-4).passed


def test_a_side_stream_that_is_not_joined_is_named_as_the_cause(device):
    side = torch.cuda.Stream(device)

    def step(x):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return x * 2

    runner = make_runner(device, step, [2], capture=False)
    runner.capture(progress=False)
    assert "side stream" in runner.failures[key(2)]
    x = randn(2, WIDTH, device=device)
    f = graphed(lambda x: x + 1, ladder=[2])
    assert same(f(x), x + 1), "captures go on after it"


def test_host_inputs_sent_far_ahead_of_the_device_are_not_overwritten_on_the_way(device):
    runner = make_runner(device, lambda x: x * 2, [4])
    busy = randn(8192, 8192, device=device)
    torch.cuda.synchronize()
    for _ in range(10):
        busy = (busy @ busy) * 1e-3
    got = [runner.run({"x": torch.full((3, WIDTH), float(i))}).clone() for i in range(1000)]
    torch.cuda.synchronize()
    assert all((out == 2 * i).all() for i, out in enumerate(got))


# -- cold kernels ----------------------------------------------------------------------------------


def test_a_triton_kernel_first_met_while_recording_is_refused_by_name(device):
    kernels = pytest.importorskip("gpu.raw_kernels")
    constant = 101
    options = CaptureOptions(warmups=0, strict=True)
    step = lambda x: kernels.add_constant(x * 2, constant)  # noqa: E731
    runner = make_runner(device, step, [2], options=options, capture=False)
    with pytest.raises(CaptureError, match="add_constant_kernel"):
        runner.capture(progress=False)
    assert runner.graphs == {}
    assert works(device)
    kernels.add_constant(torch.zeros(2, WIDTH, device=device), constant)
    runner.capture(progress=False)
    x = randn(2, WIDTH, device=device)
    assert same(runner.run({"x": x}), x * 2 + constant)


def test_warm_ups_make_a_triton_kernel_warm(device):
    kernels = pytest.importorskip("gpu.raw_kernels")
    runner = make_runner(device, lambda x: kernels.add_constant(x, 111), [2, 4])
    x = randn(3, WIDTH, device=device)
    assert same(runner.run({"x": x}), x + 111)
    assert runner.report().graphs[0].nodes in (1, None)


@pytest.mark.parametrize("mode", MODES)
def test_state_that_a_raw_kernel_changes_is_put_back_when_it_is_declared(device, mode):
    kernels = pytest.importorskip("gpu.raw_kernels")
    counter = torch.zeros(4, device=device)

    def step(x):
        kernels.add_constant(counter, 1, out=counter)
        return x + counter[0]

    with unchanged(counter):
        runner = make_runner(device, step, [2], mode=mode, state={"counter": counter})
    x = randn(2, WIDTH, device=device)
    assert same(runner.run({"x": x}), x + 1)
    assert same(runner.run({"x": x}), x + 2)


# -- memory ----------------------------------------------------------------------------------------


def test_results_copied_to_pinned_memory_are_those_of_the_call(device):
    """Trial runs write there, too, while the host reads and restores."""
    landed = torch.zeros(4, 1 << 20, pin_memory=True)
    scale = torch.ones((), device=device)

    def step(x, source):
        y = source
        for _ in range(50):
            y = y * scale
        landed.copy_(y, non_blocking=True)
        return x + 1

    f = graphed(step, ladder=[4], shared=["source"], options=CaptureOptions(strict=True))
    for turn in range(3):
        x = torch.full((4, 1 << 10), float(turn + 1), device=device)
        source = torch.full((4, 1 << 20), float(turn + 1), device=device)
        result = f(x, source)
        torch.cuda.synchronize()
        assert same(result, x + 1)
        assert same(landed, source.cpu())
    assert not f.report().eager_steps


@pytest.mark.parametrize("warmups", [0, 2])
def test_a_real_out_of_memory_sheds_rungs_and_the_rest_works(device, warmups):
    row = 64 << 20
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    allowed = torch.cuda.memory_reserved(device) + (1 << 30)

    def step(x):
        return x[:, :1].expand(-1, row // 4).mul(2).sum(1)

    torch.cuda.set_per_process_memory_fraction(allowed / total, device)
    try:
        runner = make_runner(device, step, [1, 2, 64], options=CaptureOptions(warmups=warmups), capture=False)
        report = runner.capture(progress=False)
        assert set(runner.graphs) == {key(1), key(2)}
        assert list(report.failures) == ["full decode 64x1"]
        assert "out of memory" in next(iter(report.failures.values())).lower()
        assert (
            runner.decide(runner.buffers.shape_of({"x": randn(3, WIDTH, device=device)})).reason
            is Reason.OUT_OF_MEMORY
        )
        x = randn(2, WIDTH, device=device)
        assert same(runner.run({"x": x}), step(x))
        assert works(device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.empty_cache()


def test_a_pool_stays_alive_when_all_but_one_graph_are_dropped(device):
    model = mlp(device)
    runner = make_runner(device, lambda x: model(x), [1, 2, 4, 8])
    batch = {"x": randn(2, WIDTH, device=device)}
    wanted = runner.run(batch).clone()
    for size in (8, 4, 1):
        runner.drop(key(size))
    gc.collect()
    torch.cuda.empty_cache()
    clutter = [torch.full((1 << 18,), 7.0, device=device) for _ in range(64)]
    assert same(runner.run(batch), wanted)
    later = make_runner(device, lambda x: model(x) * 2, [8], pool=runner.pool)
    other = {"x": randn(8, WIDTH, device=device)}
    assert same(later.run(other), eager_padded(later, other))
    assert same(runner.run(batch), wanted)
    assert all((block == 7).all() for block in clutter)


def test_a_dropped_pool_gives_its_memory_back(device):
    runner = make_runner(device, lambda x: x[:, :1].expand(-1, 1 << 24).mul(2).sum(1), [4])
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    held = runner.pool.bytes
    assert held >= 256 << 20
    runner.drop()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(device) <= before - (256 << 20)


# -- threads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_another_thread_may_allocate_and_launch_while_a_graph_is_captured(device, mode):
    stop, failures, rounds = threading.Event(), [], [0]

    def elsewhere():
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                while not stop.is_set():
                    y = torch.ones(1 << 16, device=device)
                    if float((y * 2).sum()) != 2 << 16:
                        failures.append("a wrong sum")
                    rounds[0] += 1
        except Exception as error:
            failures.append(repr(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    try:
        model = mlp(device)
        for _ in range(5):
            runner = make_runner(device, lambda x: model(x), [1, 2, 4, 8], mode=mode)
            for n in (1, 3, 8):
                batch = {"x": randn(n, WIDTH, device=device, seed=n)}
                assert same(runner.run(batch), eager_padded(runner, batch)[:n])
    finally:
        stop.set()
        thread.join()
    assert failures == []
    assert rounds[0] > 0


# -- compiled rungs --------------------------------------------------------------------------------


def long_chain(x):
    for i in range(8):
        x = torch.sin(x) * 0.5 + i / 10
    return x


def test_compiled_rungs_are_right_and_have_fewer_nodes(device):
    runner = make_runner(device, long_chain, [1, 2, 4], compile_up_to=2)
    nodes = {row.num_tokens: row.nodes for row in runner.report().graphs}
    assert nodes[4] >= 16
    assert nodes[1] < nodes[4]
    assert nodes[2] < nodes[4]
    for n in (1, 2, 3, 4):
        x = randn(n, WIDTH, device=device, seed=n)
        assert close(runner.run({"x": x}), long_chain(x))
    assert runner.verify().passed


def test_compiled_rungs_are_warmed_up_each_though_others_have_the_same_kernels(device):
    options = {"options": CaptureOptions(strict=True), "kernels_of": lambda key: None}
    runner = make_runner(device, long_chain, [1, 2, 4], compile_up_to=2, **options)
    assert len(runner.graphs) == 3
    assert runner.verify().passed


def test_what_the_user_compiled_is_captured_compiled_and_stays_so(device):
    nodes = {}
    for kind, function in (("plain", long_chain), ("compiled", torch.compile(long_chain))):
        f = graphed(function, ladder=[2, 4], options=CaptureOptions(strict=True))
        for n in (3, 4, 1, 2):
            x = randn(n, WIDTH, device=device, seed=n)
            assert close(f(x), long_chain(x))
        report = f.report()
        nodes[kind] = [row.nodes for row in report.graphs]
        assert (report.replays, report.eager_steps) == (4, {})
    assert max(nodes["compiled"]) < min(nodes["plain"])
    x = randn(4, WIDTH, device=device)
    with torch.profiler.profile() as profile, torch.no_grad():
        function(x)
    assert any("triton" in event.name for event in profile.events())


def test_flex_attention_is_captured_compiled(device):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attend = torch.compile(flex_attention)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device=str(device))

    def step(x):
        heads = x.view(len(x), 2, 128, 64)
        return attend(heads, heads, heads, block_mask=mask).flatten(1)

    f = graphed(step, ladder=[2, 4], options=CaptureOptions(strict=True))
    for n in (3, 2, 4):
        x = randn(n, 2 * 128 * 64, device=device, seed=n)
        heads = x.view(n, 2, 128, 64)
        wanted = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        assert close(f(x), wanted.flatten(1), 1e-2)
    assert (f.report().replays, f.report().eager_steps) == (3, {})


def test_a_compiled_module_follows_weights_updated_in_place(device):
    model = mlp(device)
    f = graphed(model, ladder=[1, 2, 4], compile_up_to=4)
    x = randn(3, WIDTH, device=device)
    before = f(x).clone()
    with torch.no_grad():
        model[2].weight.mul_(2)
        wanted = model(x)
    after = f(x).clone()
    assert not close(after, before)
    assert close(after, wanted)
    assert f.report().replays == 2


def test_state_of_a_compiled_step_advances_once_per_call(device):
    counter = torch.zeros((), device=device)

    def step(x):
        counter.add_(1)
        return x + counter

    with unchanged(counter):
        runner = make_runner(device, step, [2], compile_up_to=2)
    x = randn(2, WIDTH, device=device)
    assert close(runner.run({"x": x}), x + 1)
    assert close(runner.run({"x": x}), x + 2)


# -- raw graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_kept_raw_graph_has_as_many_nodes_as_the_report_says(device, mode):
    driver = pytest.importorskip("cuda.bindings.driver")

    @eager_boundary
    def attend(h):
        return h * 2

    options = CaptureOptions(keep_graph=True)
    runner = make_runner(device, lambda x: attend(x + 1) + 1 - 3, [2, 4], mode=mode, options=options)
    for graph, row in zip(runner.graphs.values(), runner.report().graphs, strict=True):
        assert len(graph.recorded.raw) == row.segments
        counted = 0
        for raw in graph.recorded.raw:
            answer = driver.cuGraphGetNodes(driver.CUgraph(raw), 0)
            assert int(answer[0]) == 0
            counted += int(answer[-1])
        assert counted == row.nodes == (4 if mode is GraphMode.FULL else 3)
    x = randn(3, WIDTH, device=device)
    assert same(runner.run({"x": x}), (x + 1) * 2 + 1 - 3)


# -- generators and errors -------------------------------------------------------------------------


def test_a_generator_that_was_not_named_is_an_error_and_not_a_frozen_draw(device):
    generator = torch.Generator(device).manual_seed(1)
    step = lambda x: x + torch.rand(x.shape, device=device, generator=generator)  # noqa: E731
    runner = make_runner(device, step, [2], capture=False)
    runner.capture(progress=False)
    assert runner.graphs == {}
    assert len(runner.failures) == 1
    assert works(device)


@pytest.mark.parametrize("error_mode", ["thread_local", "global", "relaxed"])
def test_every_error_mode_captures(device, error_mode):
    runner = make_runner(device, lambda x: x * 2, [2], options=CaptureOptions(error_mode=error_mode))
    x = randn(2, WIDTH, device=device)
    assert same(runner.run({"x": x}), x * 2)


def test_a_pool_of_the_cpu_is_refused_for_buffers_on_the_gpu(device):
    with pytest.raises(ConfigError, match=r"pool is on cpu.*buffers are on cuda"):
        make_runner(device, lambda x: x, [2], pool=GraphPool("cpu"), capture=False)


def test_a_host_batch_and_a_device_batch_give_the_same(device):
    fields = [x_field(), Field("ids", torch.int64)]
    runner = make_runner(device, lambda x, ids: x + ids[:, None], [4], fields=fields)
    x, ids = randn(3, WIDTH, device=torch.device("cpu")), torch.arange(3)
    wanted = (x + ids[:, None]).to(device)
    for batch in (
        {"x": x, "ids": ids},
        {"x": x.to(device), "ids": ids.to(device)},
        {"x": x.to(device), "ids": ids.numpy()},
        {"x": x.numpy(), "ids": ids.to(device)},
    ):
        assert same(runner.run(batch), wanted)
    large = {"x": x.repeat(2, 1), "ids": ids.repeat(2)}
    assert same(runner.run(large), wanted.repeat(2, 1))
    assert runner.eager_steps == {Reason.LARGER_THAN_MAX: 1}


# -- collectives -----------------------------------------------------------------------------------


@pytest.fixture
def nccl_group(device):
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available()):
        pytest.skip("this build of torch has no NCCL")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", MODES)
def test_a_functional_all_reduce_is_captured_and_replayed(device, nccl_group, mode):
    from torch.distributed import _functional_collectives as functional

    def reduce(x):
        return functional.wait_tensor(functional.all_reduce(x * 2, "sum", nccl_group)) + 1

    step = CallCounter(reduce)
    runner = make_runner(device, step, [2, 4], mode=mode)
    calls = step.calls
    for n in (4, 1, 3):
        x = randn(n, WIDTH, device=device, seed=n)
        assert same(runner.run({"x": x}), x * 2 + 1)
    assert step.calls == calls
    assert works(device)
