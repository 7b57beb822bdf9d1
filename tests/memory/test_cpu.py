"""A saver on a CPU: the process shrinks, and nothing that fails leaves a trace."""

import ctypes
import faulthandler
import gc
import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ostinato.memory import TAGS, Content, Held, MemorySaver, SaverError, SaverMemoryError, Tag, host_mappings
from ostinato.memory.saver import HOSTILE

from .known_numbers import MIB, filled, is_intact

PAGE = 4096


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@contextmanager
def failing(name: str, after: int) -> Iterator[None]:
    """The system refuses from the call of this number on: `protect` to touch pages, `write` to a backup."""
    calls = itertools.count()
    patch = pytest.MonkeyPatch()
    real = host_mappings.protect

    def protect(address: int, size: int, access: int) -> None:
        if access and next(calls) >= after:
            raise OSError(12, "Cannot allocate memory")
        real(address, size, access)

    def write(self: object, pages: object) -> None:
        if next(calls) >= after:
            raise OSError(28, "No space left on device")
        real_write(self, pages)  # type: ignore[arg-type]

    real_write = host_mappings.FileBackup.write
    if name == "protect":
        patch.setattr(host_mappings, "protect", protect)
    else:
        patch.setattr(host_mappings.FileBackup, "write", write)
    try:
        yield
    finally:
        patch.undo()


# -- the process shrinks ---------------------------------------------------------------------------


@pytest.mark.parametrize("backup", [True, False])
def test_the_process_gives_back_what_it_says(backup: bool) -> None:
    saver = MemorySaver("cpu")
    kept = [
        filled(saver, 8, "weights", "data"),
        filled(saver, 2, "graphs", "once"),
        filled(saver, 24, "kv_cache", "scratch"),
    ]
    before = resident_bytes()
    paused = saver.pause(backup=backup)
    assert paused.released == 34 * MIB
    assert paused.backed_up == (10 if backup else 2) * MIB
    assert before - resident_bytes() >= 0.9 * paused.released
    assert saver.resume().lost == (() if backup else ("weights",))
    assert is_intact(kept[1])
    assert is_intact(kept[0]) == backup


def test_memory_of_dropped_tensors_goes_back_though_it_is_paused() -> None:
    saver = MemorySaver("cpu")
    kept, gone = filled(saver, 1, "weights", "data"), filled(saver, 16, "weights", "data")
    saver.pause()
    del gone
    gc.collect()
    assert saver.bytes()["weights"] == {Content.DATA: Held(0, MIB, MIB)}
    assert saver.resume().taken == MIB
    assert is_intact(kept)


def test_touching_what_is_paused_ends_the_process_instead_of_giving_zeros() -> None:
    saver = MemorySaver("cpu")
    kept = filled(saver, 1, "weights", "data")
    saver.pause()
    child = os.fork()
    if not child:
        faulthandler.disable()
        ctypes.string_at(kept.data_ptr(), 4)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    saver.resume()
    assert is_intact(kept)


def test_results_of_any_function_inside_a_region_lie_there_and_views_do_not_move() -> None:
    saver = MemorySaver("cpu")
    outside = torch.arange(6.0)
    with saver.region("weights"):
        made = outside * 2
        same = outside.add_(1)
        view = outside[2:]
        strided = torch.empty_strided((2, 3), (1, 2)).copy_(outside.view(2, 3))
        module = torch.nn.Linear(3, 2)
        first, second = torch.stack([outside, outside]).max(dim=0)
    assert same is outside
    assert saver.kind_of(outside) is None
    assert saver.kind_of(view) is None
    inside = (made, strided, module.weight, module.bias, first, second)
    assert all(saver.kind_of(tensor) == ("weights", Content.DATA) for tensor in inside)
    assert strided.stride() == (1, 2)
    assert made.tolist() == [0, 2, 4, 6, 8, 10]
    assert strided.tolist() == [[1, 2, 3], [4, 5, 6]]
    saver.pause()
    saver.resume()
    assert made.tolist() == [0, 2, 4, 6, 8, 10]
    assert module(torch.ones(1, 3)).shape == (1, 2)


# -- errors ----------------------------------------------------------------------------------------


def test_a_resume_that_fails_takes_nothing_and_can_be_repeated() -> None:
    saver = MemorySaver("cpu", hostile=True)
    blocks = [filled(saver, 1, "weights", "data", seed) for seed in range(5)]
    saver.pause()
    with failing("protect", after=3), pytest.raises(SaverMemoryError, match="Cannot allocate memory"):
        saver.resume()
    assert saver.paused == TAGS
    assert saver.bytes()["weights"][Content.DATA].mapped == 0
    assert saver.resume().restored == 5 * MIB
    assert all(is_intact(block, seed) for seed, block in enumerate(blocks))


def test_a_pause_that_finds_no_room_changes_nothing() -> None:
    saver = MemorySaver("cpu")
    blocks = [filled(saver, 1, "weights", "data", seed) for seed in range(3)]
    with failing("write", after=1), pytest.raises(SaverMemoryError, match="No space left"):
        saver.pause()
    assert saver.paused == ()
    assert all(is_intact(block, seed) for seed, block in enumerate(blocks))
    saver.pause()
    saver.resume()
    assert all(is_intact(block, seed) for seed, block in enumerate(blocks))


def test_an_interrupted_release_is_finished_by_the_next_pause() -> None:
    saver = MemorySaver("cpu")
    blocks = [filled(saver, 1, "weights", "data", seed) for seed in range(3)]
    patch = pytest.MonkeyPatch()
    calls, real = itertools.count(), host_mappings.protect

    def interrupted(address: int, size: int, access: int) -> None:
        if next(calls) == 1:
            raise KeyboardInterrupt
        real(address, size, access)

    patch.setattr(host_mappings, "protect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saver.pause()
    patch.undo()
    assert saver.pause().tags == ()
    assert saver.bytes()["weights"][Content.DATA].mapped == 0
    saver.resume()
    assert all(is_intact(block, seed) for seed, block in enumerate(blocks))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda saver: saver.pause(["weight"]), "unknown tag 'weight': use weights, kv_cache, graphs"),
        (lambda saver: saver.pause("weights"), r"tags must be a list.*use \['weights'\]"),
        (lambda saver: saver.resume(["cuda_graph"]), "unknown tag 'cuda_graph'"),
        (lambda saver: saver.empty((1,), torch.int8, "weights", "constant"), "use data, scratch, once"),
        (lambda saver: saver.on_resume("x", print), "unknown tag 'x'"),
        (lambda saver: saver.graph_pool(), "graph pools exist only on a GPU"),
        (lambda saver: MemorySaver("meta"), "a memory saver cannot manage memory of meta"),
    ],
)
def test_mistakes_are_named(call, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SaverError, match=message):
        call(MemorySaver("cpu"))


# -- any sequence of calls -------------------------------------------------------------------------

some_tags = st.lists(st.sampled_from(TAGS), min_size=1, unique=True)


class AnySequence(RuleBasedStateMachine):
    """A saver beside a model of what every block should contain."""

    def __init__(self) -> None:
        super().__init__()
        self.saver = MemorySaver("cpu", hostile=True)
        self.seeds = itertools.count(1)
        self.blocks: list[tuple[torch.Tensor, int, Tag, Content, int]] = []
        """Tensor, address, tag, class, and the number it is full of."""
        self.asleep: dict[Tag, bool] = {}
        """Whether their data was backed up."""

    @rule(tag=st.sampled_from(TAGS), content=st.sampled_from(Content), size=st.integers(1, 3 * PAGE // 4))
    def allocate(self, tag: Tag, content: Content, size: int) -> None:
        if tag in self.asleep:
            with pytest.raises(SaverError, match="paused"):
                self.saver.empty((size,), torch.int32, tag, content)
            return
        seed = next(self.seeds)
        tensor = self.saver.empty((size,), torch.int32, tag, content).fill_(seed)
        self.blocks.append((tensor, tensor.data_ptr(), tag, content, seed))

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        del self.blocks[data.draw(st.integers(0, len(self.blocks) - 1))]

    @rule(tags=some_tags, backup=st.booleans())
    def pause(self, tags: list[Tag], backup: bool) -> None:
        awake = [tag for tag in TAGS if tag in tags and tag not in self.asleep]
        assert self.saver.pause(tags, backup=backup).tags == tuple(awake)
        self.asleep |= dict.fromkeys(awake, backup)

    @rule(tags=some_tags, after=st.integers(0, 3))
    def failing_pause(self, tags: list[Tag], after: int) -> None:
        saved = [each for each in self.blocks if each[2] in tags and each[2] not in self.asleep]
        saved = [each for each in saved if each[3] is not Content.SCRATCH]
        if len(saved) <= after:
            return
        with failing("write", after), pytest.raises(SaverMemoryError):
            self.saver.pause(tags)

    @rule(tags=some_tags)
    def resume(self, tags: list[Tag]) -> None:
        asleep = [tag for tag in TAGS if tag in tags and tag in self.asleep]
        resumed = self.saver.resume(tags)
        assert resumed.tags == tuple(asleep)
        for tag in asleep:
            backed_up = self.asleep.pop(tag)
            for at, (tensor, address, of, content, seed) in enumerate(self.blocks):
                if of == tag and (content is Content.SCRATCH or (content is Content.DATA and not backed_up)):
                    assert (tensor == HOSTILE).all()
                    tensor.fill_(seed)
                    self.blocks[at] = (tensor, address, of, content, seed)

    @rule(tags=some_tags, after=st.integers(0, 3))
    def failing_resume(self, tags: list[Tag], after: int) -> None:
        taken = [each for each in self.blocks if each[2] in tags and each[2] in self.asleep]
        if len(taken) <= after:
            return
        with failing("protect", after), pytest.raises(SaverMemoryError):
            self.saver.resume(tags)

    @invariant()
    def everything_is_where_and_what_it_should_be(self) -> None:
        assert set(self.saver.paused) == set(self.asleep)
        for tensor, address, tag, content, seed in self.blocks:
            assert tensor.data_ptr() == address
            assert self.saver.kind_of(tensor) == (tag, content)
            assert tag in self.asleep or bool((tensor == seed).all())
        held = self.saver.bytes()
        for tag in TAGS:
            for content in Content:
                sizes = [
                    -(-each[0].nbytes // PAGE) * PAGE for each in self.blocks if each[2:4] == (tag, content)
                ]
                found = held[tag].get(content, Held())
                assert (found.released if tag in self.asleep else found.mapped) == sum(sizes)
                assert (found.mapped if tag in self.asleep else found.released) == 0

    def teardown(self) -> None:
        self.saver.close()


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
