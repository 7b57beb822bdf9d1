"""Clause 6: the collector is frozen while capturing and found as it was afterwards."""

import gc
import threading

import pytest

from contract.steps import make_runner
from ostinato.graphs import CaptureOptions, frozen_gc


def state():
    # Since Python 3.12 a few hundred immortal objects always count as frozen; a real freeze takes them all.
    return gc.isenabled(), gc.get_freeze_count() > 5_000


@pytest.fixture(autouse=True)
def tidy():
    gc.unfreeze()
    gc.enable()
    yield
    gc.unfreeze()
    gc.enable()


def watched(seen):
    def step(x):
        seen.append(state())
        return x * 2

    return step


def test_it_is_off_and_frozen_while_capturing_and_as_before_afterwards(device):
    seen = []
    make_runner(device, watched(seen), [2, 4], options=CaptureOptions())
    assert set(seen) == {(False, True)}
    assert state() == (True, False)


def test_it_is_left_alone_when_asked(device):
    seen = []
    make_runner(device, watched(seen), [2], options=CaptureOptions(freeze_gc=False))
    assert set(seen) == {(True, False)}
    assert state() == (True, False)


@pytest.mark.parametrize("enabled", [True, False])
def test_it_is_as_before_after_an_exception(device, enabled):
    def step(x):
        raise ValueError("no")

    if not enabled:
        gc.disable()
    runner = make_runner(device, step, [2], capture=False, options=CaptureOptions(strict=True))
    with pytest.raises(ValueError, match="no"):
        runner.capture(progress=False)
    assert state() == (enabled, False)


def test_it_is_as_before_after_an_interrupt(device):
    def step(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_runner(device, step, [2], capture=False, options=CaptureOptions()).capture(progress=False)
    assert state() == (True, False)


def test_what_the_user_had_frozen_stays_frozen(device):
    gc.freeze()
    frozen = gc.get_freeze_count()
    make_runner(device, lambda x: x * 2, [2], options=CaptureOptions())
    assert gc.isenabled()
    # Frozen objects may die meanwhile; unfreezing would leave none.
    assert frozen * 0.9 < gc.get_freeze_count() <= frozen


def test_a_collector_that_was_off_stays_off(device):
    gc.disable()
    make_runner(device, lambda x: x * 2, [2], options=CaptureOptions())
    assert state() == (False, False)


def test_garbage_is_collected_before_the_capture(device):
    class Node:
        alive = 0

        def __init__(self):
            self.me = self
            Node.alive += 1

        def __del__(self):
            Node.alive -= 1

    gc.disable()
    Node()
    assert Node.alive == 1
    with frozen_gc():
        assert Node.alive == 0


def test_inside_of_itself_it_neither_collects_again_nor_ends(device, monkeypatch):
    collected = []
    collect = gc.collect
    monkeypatch.setattr(gc, "collect", lambda *generation: collected.append(1) or collect(*generation))
    with frozen_gc():
        make_runner(device, lambda x: x * 2, [2], options=CaptureOptions())
        assert state() == (False, True)
        with pytest.raises(ValueError, match="no"), frozen_gc():
            raise ValueError("no")
        assert state() == (False, True)
    assert len(collected) == 1
    assert state() == (True, False)
    with frozen_gc():
        assert len(collected) == 2


def test_one_thread_does_not_thaw_what_another_still_wants_frozen():
    is_inside, may_leave = threading.Event(), threading.Event()

    def other():
        with frozen_gc():
            is_inside.set()
            may_leave.wait()

    thread = threading.Thread(target=other)
    with frozen_gc():
        thread.start()
        is_inside.wait()
    assert state() == (False, True)
    may_leave.set()
    thread.join()
    assert state() == (True, False)
