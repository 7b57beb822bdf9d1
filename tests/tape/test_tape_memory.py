"""Placement by liveness, sharing of a pool, and what stays where it is."""

import gc
from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tape_recording import check_replays, record
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ostinato.graphs.backends.tape import TapeBackend
from ostinato.graphs.backends.tape.arena import ALIGNMENT, TapeMemory, place
from ostinato.graphs.options import CaptureOptions


class Interval(NamedTuple):
    """What placing looks at in a storage's record."""

    first: int
    last: int
    nbytes: int


INTERVALS = st.lists(
    st.builds(
        lambda first, length, nbytes: Interval(first, first + length, nbytes),
        st.integers(0, 40),
        st.integers(0, 20),
        st.integers(0, 1000),
    ),
    max_size=60,
)


@given(INTERVALS)
@settings(max_examples=300, deadline=None)
def test_live_memory_never_overlaps(intervals):
    offsets, total = place(intervals)
    placed = list(zip(intervals, offsets, strict=True))
    for index, (one, at) in enumerate(placed):
        assert at % ALIGNMENT == 0
        assert at + one.nbytes <= total or one.nbytes == 0
        for other, there in placed[:index]:
            together = one.first <= other.last and other.first <= one.last
            apart = at + one.nbytes <= there or there + other.nbytes <= at
            assert apart or not together or not one.nbytes or not other.nbytes


@given(INTERVALS)
@settings(max_examples=100, deadline=None)
def test_placement_needs_no_more_than_everything_at_once(intervals):
    _, total = place(intervals)
    assert total <= sum(-(-interval.nbytes // ALIGNMENT) * ALIGNMENT for interval in intervals)


def test_a_chain_needs_two_places():
    offsets, total = place([Interval(n, n + 1, 256) for n in range(50)])
    assert total == 512
    assert set(offsets) == {0, 256}


def test_many_intervals_are_placed_quickly():
    offsets, _ = place([Interval(n, n + 1 + (n * 7919) % 97, 64 * (1 + n % 13)) for n in range(20_000)])
    assert len(offsets) == 20_000


def deep_mlp(layers=24, width=64):
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.SiLU())))


def test_a_deep_mlp_needs_a_small_fraction_of_its_intermediates():
    net, x = deep_mlp(), torch.randn(32, 64)
    recorded = record(net, x)
    intermediates = 48 * 32 * 64 * 4
    assert recorded.memory.bytes <= intermediates / 10
    with torch.no_grad():
        assert torch.equal(recorded.replay(), net(x))


def test_recording_keeps_no_intermediate_alive():
    dead = []

    def step(x):
        y = x + 1
        ref = StorageWeakRef(y.untyped_storage())
        y = y * 2
        dead.append(ref.expired())
        return y

    record(step, torch.ones(5))
    assert dead == [True]


def test_smaller_tapes_fit_into_the_memory_of_the_largest():
    net, memory = deep_mlp(), TapeMemory()
    record(net, torch.randn(64, 64), memory=memory)
    before = memory.bytes
    small = record(net, torch.randn(8, 64), memory=memory)
    assert memory.bytes == before
    assert memory.contains(small.out.data_ptr())
    record(net, torch.randn(128, 64), memory=memory)
    assert memory.bytes > before


def test_a_replay_overwrites_outputs_of_other_tapes_but_not_what_somebody_holds():
    memory = TapeMemory()
    x, y = torch.ones(8), torch.full((8,), 5.0)
    stash = []
    shared = record(lambda: x + 1, memory=memory)
    held = record(lambda: stash.append(x + 2) or stash[0], memory=memory)
    shared.replay()
    held.replay()
    other = record(lambda: y * 3, memory=memory)
    assert shared.out.tolist() == [2] * 8, "recording wrote over the output of another tape"
    other.replay()
    assert shared.out.tolist() == [15] * 8
    assert held.out.tolist() == [3] * 8


def test_outputs_have_no_values_before_the_first_replay():
    recorded = record(lambda x: (x * 2, x.double() + 1, x.bfloat16() * 2), torch.ones(4))
    assert all(leaf.isnan().all() for leaf in recorded.out)


def test_addresses_never_change():
    recorded = record(lambda x: x * 2, torch.ones(4))
    address = recorded.out.data_ptr()
    for _ in range(3):
        recorded.replay()
        assert recorded.out.data_ptr() == address


def test_a_stashed_tensor_sees_replayed_values():
    stash = {}

    def step(x):
        stash["hidden"] = x + 1
        return stash["hidden"] * 2

    x = torch.ones(3)
    recorded = record(step, x)
    x.fill_(4)
    recorded.replay()
    assert stash["hidden"].tolist() == [5, 5, 5]
    assert recorded.out.tolist() == [10, 10, 10]


def test_a_stashed_output_sees_replayed_values_and_is_not_overwritten():
    memory, stash = TapeMemory(), []

    def step(x):
        stash.append(x + 1)
        return stash[0]

    x = torch.ones(3)
    recorded = record(step, x, memory=memory)
    other = record(lambda: x * 100, memory=memory)
    x.fill_(4)
    recorded.replay()
    other.replay()
    assert stash[0].tolist() == recorded.out.tolist() == [5, 5, 5]


def test_held_memory_is_counted_while_the_tape_lives():
    memory = TapeMemory()
    stash = []
    recorded = record(lambda: stash.append(torch.zeros(1000)) or stash[0], memory=memory)
    assert memory.bytes == 4000
    assert memory.contains(recorded.out.data_ptr())
    stash.clear()
    del recorded
    gc.collect()
    assert memory.bytes == 0


def test_index_tensors_of_the_step_are_not_taken_for_stashed():
    cache = torch.zeros(16, 4)

    def step(x):
        slots = torch.arange(3) + 5
        cache.index_put_((slots,), x)
        return cache[slots] * 2

    recorded = record(step, torch.ones(3, 4))
    assert recorded.memory.bytes < 1000
    assert not recorded.memory._held


def test_a_tape_outlives_its_session_and_memory():
    recorded = record(lambda x: (x + 1) * 2, torch.ones(3))
    recorded.memory = None
    gc.collect()
    assert recorded.replay().tolist() == [4, 4, 4]


def test_segments_share_values_with_an_eager_call_between_them():
    backend = TapeBackend()
    session = backend.session(backend.new_memory(), CaptureOptions())
    x, bridge = torch.ones(4), torch.empty(4)
    answers = []
    with torch.no_grad():
        session.begin()
        before = x * 2
        keep_apart = torch.zeros(4) + before  # used behind the pause as well
        session.pause()
        answers.append(torch.cuda.is_current_stream_capturing())
        given = session.keep(before)
        bridge.copy_(torch.tensor(before.tolist()) + 100)  # host reads are fine here
        session.resume()
        answers.append(torch.cuda.is_current_stream_capturing())
        out = session.keep(bridge + keep_apart)
        del before, keep_apart
        tape = session.finish()
    assert answers == [False, True]
    assert len(tape.segments) == 2
    for value in (3.0, 7.0):
        x.fill_(value)
        tape.segments[0].replay()
        assert given.tree.tolist() == [2 * value] * 4
        bridge.copy_(given.tree + 100)
        tape.segments[1].replay()
        assert out.tree.tolist() == [4 * value + 100] * 4


def test_what_an_eager_call_writes_into_its_arguments_reaches_the_next_segment():
    backend = TapeBackend()
    session = backend.session(backend.new_memory(), CaptureOptions())
    x = torch.ones(4)
    with torch.no_grad():
        session.begin()
        y = x * 2
        session.pause()
        kept = session.keep((y, [y[1:], x]))
        y.add_(1)  # an eager call may write its arguments; the next segment reads that
        session.resume()
        out = session.keep(y * 10)
        del y
        tape = session.finish()
    resolved, (tail, outside) = kept.tree
    assert tail.data_ptr() == resolved.data_ptr() + 4
    assert outside.data_ptr() == x.data_ptr()
    tape.segments[0].replay()
    resolved.add_(1)
    tape.segments[1].replay()
    assert out.tree.tolist() == [30] * 4


WIDTH = 6
PIECES = {
    "add": lambda x, y: x + y,
    "scale": lambda x, y: x * 0.5 - y,
    "matmul": lambda x, y: x @ y.T / 6,
    "write": lambda x, y: x.clone().mul_(2),
    "view_write": lambda x, y: (x + 0).t().add_(y.t()).t(),
    "rows": lambda x, y: torch.cat([x[:2], y[2:]]),
    "softmax": lambda x, y: x.softmax(-1),
    "sort": lambda x, y: x.sort(1).values + y.sort(0).values,
    "expand": lambda x, y: x[:1].expand(WIDTH, -1) + y,
    "sum": lambda x, y: x.sum(0, keepdim=True) * 0.1 + y,
    "noise": lambda x, y: x + torch.rand_like(y),
    "cast": lambda x, y: x.double().add(y).float(),
}


@given(
    st.lists(st.tuples(st.sampled_from(sorted(PIECES)), st.integers(0, 9), st.integers(0, 9)), max_size=14)
)
@settings(max_examples=60, deadline=None)
def test_any_mix_of_operations_replays_like_eager(program):
    def step(x, y):
        values = [x, y]
        for name, left, right in program:
            values.append(PIECES[name](values[left % len(values)], values[right % len(values)]))
        return values[-1], values[len(values) // 2]

    torch.manual_seed(0)
    check_replays(step, torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH), values=2)
