"""What others build on: rows per request, inputs to record with, memory from elsewhere, ranks."""

import pytest
import torch

from contract.steps import WIDTH, key, make_runner, randn, reasons, same, x_field
from ostinato.graphs import (
    BatchDescriptor,
    BatchError,
    BatchShape,
    CaptureError,
    CaptureOptions,
    ConfigError,
    CudaGraphRunner,
    Field,
    GraphKey,
    GraphMode,
    GraphPool,
    InputBuffers,
    eager_boundary,
)
from ostinato.graphs.capturing.gate import is_recording

QUICK = CaptureOptions(freeze_gc=False)


# -- several rows for each request ---------------------------------------------------------------------


def test_a_field_may_have_several_rows_for_each_request(device):
    fields = [x_field(), Field("drafts", torch.int64, per="request", each=3, pad=7)]
    runner = make_runner(device, lambda x, drafts: (x, drafts * 2), [2, 4], fields=fields, rows_per_request=3)
    for n in (1, 3, 2, 4):
        x, drafts = randn(n, WIDTH, device=device), torch.arange(3 * n, device=device)
        assert same(runner.run({"x": x, "drafts": drafts}), (x, drafts * 2)), n
    assert reasons(runner) == {}


def test_the_padded_rows_of_such_a_field_hold_its_padding(device):
    held = torch.zeros(12, dtype=torch.int64, device=device)
    fields = [Field("drafts", torch.int64, per="request", each=3, pad=7)]

    def step(drafts):
        held.copy_(drafts)
        return drafts

    runner = make_runner(device, step, [4], fields=fields, rows_per_request=3)
    runner.run({"drafts": torch.arange(6, device=device)})
    assert held.tolist() == [0, 1, 2, 3, 4, 5, *[7] * 6]


def test_rows_that_are_no_multiple_are_refused(device):
    fields = [Field("drafts", torch.int64, per="request", each=3)]
    runner = make_runner(device, lambda drafts: drafts, [4], fields=fields, rows_per_request=3)
    with pytest.raises(BatchError, match="multiple of 3"):
        runner.run({"drafts": torch.arange(5, device=device)})
    with pytest.raises(ConfigError, match="each"):
        Field("drafts", torch.int64, each=0)


def test_outputs_with_several_rows_for_each_request_are_cut_where_that_was_declared(device):
    step = lambda x: x.repeat_interleave(2, 0)  # noqa: E731
    runner = make_runner(device, step, [2, 4], rows_per_request=2)
    x = randn(3, WIDTH, device=device)
    assert same(runner.run({"x": x}), step(x))
    undeclared = make_runner(device, step, [2, 4], capture=False)
    assert all("output" in cause for cause in undeclared.capture(progress=False).failures.values())
    assert undeclared.graphs == {}


def test_outputs_of_a_draft_and_of_its_verification_have_their_own_rows(device):
    """As speculative decoding has them: tokens of three, a row for each token, one for each request."""
    fields = [Field("ids", torch.int64), Field("lengths", torch.int64, per="request", pad=1)]
    buffers = InputBuffers(fields, max_tokens=12, max_reqs=4, device=device)
    keys = [GraphKey(GraphMode.FULL, BatchDescriptor.decode(n, 3)) for n in (2, 4)]

    def step(ids, lengths):
        return ids * 2, lengths + 1, ids.view(-1, 3).cumsum(1)

    runner = CudaGraphRunner(step, buffers, keys, options=QUICK)
    runner.capture(progress=False)
    assert not runner.failures
    for n in (3, 1):
        ids, lengths = torch.arange(3 * n, device=device), torch.arange(n, device=device)
        assert same(runner.run({"ids": ids, "lengths": lengths}, BatchShape.decode(n, 3)), step(ids, lengths))


# -- inputs of the warm-up and of the recording --------------------------------------------------------


def test_inputs_to_record_with_may_differ_from_those_of_the_warm_up(device):
    seen = []

    @eager_boundary
    def look(x):
        seen.append((is_recording(), float(x[0, 0])))
        return x * 2

    def filled_with(value):
        return lambda descriptor: {"x": torch.full((descriptor.num_tokens, WIDTH), value, device=device)}

    runner = make_runner(
        device,
        look,
        [2],
        mode=GraphMode.PIECEWISE,
        dummy=filled_with(3.0),
        record_dummy=filled_with(5.0),
    )
    assert {value for recording, value in seen if not recording} == {3.0}
    assert {value for recording, value in seen if recording} == {5.0}
    x = randn(2, WIDTH, device=device)
    assert same(runner.run({"x": x}), x * 2)


# -- where memory comes from ---------------------------------------------------------------------------


class Counted:
    """Memory that knows what was asked of it."""

    def __init__(self, device):
        self.device, self.taken, self.pools = device, [], []
        self._mempool = torch.cuda.MemPool() if device.type == "cuda" else None

    def allocate(self, nbytes):
        block = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.taken.append((block.data_ptr(), nbytes))
        return block

    intermediates = allocate

    def graph_pool(self):
        self.pools.append(self._mempool.id)
        return self._mempool.id

    def drop_unused_pools(self):
        """It keeps its one."""

    def holds(self, tensor):
        return any(start <= tensor.data_ptr() < start + size for start, size in self.taken)


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.PIECEWISE])
def test_a_pool_takes_all_its_memory_from_where_it_is_told(device, mode):
    memory = Counted(device)
    pool = GraphPool(device, memory=memory)
    buffers = InputBuffers([x_field()], max_tokens=4, device=device, allocate=pool.allocate)

    @eager_boundary
    def attend(x):
        return x + 1

    def step(x):
        return (attend(x) * 2).tanh() * 3

    options = CaptureOptions(freeze_gc=False, weak_output=False)
    keys, settings = [key(n, mode) for n in (2, 4)], _dispatched(mode)
    runner = CudaGraphRunner(step, buffers, keys, pool=pool, options=options, results="unguarded", **settings)
    runner.capture(progress=False)
    assert not runner.failures
    x = randn(3, WIDTH, device=device)
    out = runner.run({"x": x})
    assert torch.allclose(out, step(x))
    assert memory.holds(buffers.arena)
    assert memory.holds(out), "results with memory of their own"
    if mode is GraphMode.PIECEWISE:
        assert len(memory.taken) >= 4, "inputs, results and bridges"
    if device.type == "cuda":
        assert memory.pools, "captures go to the pool that the memory names"
    else:
        assert memory.holds(torch.empty(0, dtype=torch.uint8).set_(pool.memory.slab(1)))


def _dispatched(mode):
    from ostinato.graphs import Dispatcher

    return {"dispatcher": Dispatcher(mode)}


# -- ranks ---------------------------------------------------------------------------------------------


def doubled(x):
    return x * 2


def test_ranks_agree_on_what_all_of_them_have_captured(device):
    told = []

    def agree(keys):
        told.append(set(keys))
        return [one for one in keys if one != key(4)]

    runner = make_runner(device, doubled, [2, 4, 8], capture=False, agree=agree)
    runner.capture(progress=False)
    assert told == [{key(2), key(4), key(8)}]
    assert set(runner.graphs) == {key(2), key(8)}
    assert "another rank" in runner.failures[key(4)]
    x = randn(3, WIDTH, device=device)
    assert same(runner.run({"x": x}), x * 2)
    assert runner.graphs[key(8)].replays == 1, "the next larger one that all have"


def test_a_rank_that_fails_tells_the_others_instead_of_leaving_them_waiting(device):
    told = []

    def step(x):
        raise ValueError("not on this rank")

    options = CaptureOptions(strict=True, freeze_gc=False)
    agree = lambda keys: told.append(list(keys)) or keys  # noqa: E731
    runner = make_runner(device, step, [2], capture=False, agree=agree, options=options)
    with pytest.raises(ValueError, match="not on this rank"):
        runner.capture(progress=False)
    assert told == [[]]


def test_what_no_rank_agreed_on_runs_eagerly_for_that_reason(device):
    runner = make_runner(device, doubled, [2], capture=False, agree=lambda keys: ())
    runner.capture(progress=False)
    x = randn(2, WIDTH, device=device)
    assert same(runner.run({"x": x}), x * 2)
    assert reasons(runner) == {"other-rank": 1}


# -- state that Python decides -------------------------------------------------------------------------


def test_a_position_counted_in_python_is_refused_because_a_graph_would_stand_still(device):
    cache, position = torch.zeros(64, WIDTH, device=device), [0]

    def step(x):
        cache[position[0]].copy_(x[0])
        position[0] += 1
        return x + cache[: position[0]].sum(0)

    runner = make_runner(device, step, [1], capture=False, options=CaptureOptions(strict=True))
    with pytest.raises(CaptureError, match="different work"):
        runner.capture(progress=False)
