"""While contents are copied back the rest of the memory is taken and written; nothing comes too early."""

from contextlib import contextmanager

import pytest
import torch

from memory.known_numbers import filled, is_intact
from ostinato.memory import Content, MemorySaver, SaverMemoryError
from ostinato.memory.cuda_mappings import _PIECE, _pieces
from ostinato.memory.host_mappings import HostMappings


@pytest.fixture
def events(monkeypatch):
    """What happens in a resume, in order."""
    happened = []
    taken, copied = HostMappings.map, HostMappings.copying_in

    def noted_map(mappings, kinds):
        if kinds:
            happened.append(f"take {' '.join(sorted({kind.tag for kind in kinds}))}")
        taken(mappings, kinds)

    @contextmanager
    def noted_copies(mappings, blocks, backups):
        happened.append("copies begin")
        with copied(mappings, blocks, backups):
            yield
        happened.append("copies end")

    monkeypatch.setattr(HostMappings, "map", noted_map)
    monkeypatch.setattr(HostMappings, "copying_in", noted_copies)
    return happened


@pytest.fixture
def saver():
    saver = MemorySaver("cpu")
    yield saver
    saver.close()


def test_what_is_not_copied_is_taken_and_written_meanwhile(saver, events):
    weights = filled(saver, 1, "weights", "data")
    kv = saver.empty((4096,), torch.uint8, "kv_cache", "scratch")
    saver.on_resume("kv_cache", lambda: (events.append("write kv_cache"), kv.zero_()))
    saver.on_resume("weights", lambda: events.append(f"write weights, intact: {is_intact(weights)}"))
    saver.pause()
    resumed = saver.resume()
    assert events == [
        "take weights",
        "copies begin",
        "take graphs kv_cache weights",  # of weights what is not data
        "write kv_cache",
        "copies end",
        "write weights, intact: True",
    ]
    assert set(resumed.seconds) == {"take", "copy", "rewrite"}
    assert not kv.any()


def test_memory_that_ends_while_copies_are_under_way_leaves_all_of_it_paused(saver, monkeypatch):
    weights = filled(saver, 1, "weights", "data")
    kv = saver.empty((4096,), torch.uint8, "kv_cache", "scratch")
    saver.pause()
    taken, calls = HostMappings.map, []

    def first_only(mappings, kinds):
        calls.append(kinds)
        if len(calls) == 2:
            raise SaverMemoryError("there is no more")
        taken(mappings, kinds)

    monkeypatch.setattr(HostMappings, "map", first_only)
    with pytest.raises(SaverMemoryError, match="no more"):
        saver.resume()
    assert saver.paused == ("weights", "kv_cache", "graphs")
    held = saver.bytes()
    assert held["weights"][Content.DATA].mapped == held["kv_cache"][Content.SCRATCH].mapped == 0
    saver.resume()
    assert is_intact(weights)
    kv.zero_()


def test_hostile_contents_come_before_what_is_restored(events):
    saver = MemorySaver("cpu", hostile=True)
    weights = filled(saver, 1, "weights", "data")
    saver.pause()
    saver.resume()
    assert events[0] == "take graphs kv_cache weights"
    assert is_intact(weights)
    saver.close()


def test_pieces_cover_each_block_once(saver, monkeypatch):
    from ostinato.memory import cuda_mappings
    from ostinato.memory.blocks import Block, Kind

    kind = Kind("weights", Content.DATA)
    blocks = [Block(1, 1 << 40, 2 * _PIECE + 8, kind, True), Block(2, 1 << 41, 16, kind, True)]
    monkeypatch.setattr(cuda_mappings, "_pinned", lambda backups, block: backups[block.serial])

    class Room:
        address = 1 << 30

    pieces = list(_pieces(blocks, {1: Room(), 2: Room()}))
    assert pieces == [
        (1 << 40, 1 << 30, _PIECE),
        ((1 << 40) + _PIECE, (1 << 30) + _PIECE, _PIECE),
        ((1 << 40) + 2 * _PIECE, (1 << 30) + 2 * _PIECE, 8),
        (1 << 41, 1 << 30, 16),
    ]
