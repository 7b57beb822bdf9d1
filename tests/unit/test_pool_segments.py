"""The map of a pool's memory follows the allocator, and is not drawn anew while nothing changes."""

from typing import Any

import pytest
import torch

from ostinato.graphs.backends.pool_segments import PoolSegments

OURS, OTHERS = (0, 7), (0, 8)


class Allocator:
    """What torch says of its segments, and how often it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.segments: list[dict[str, Any]] = []
        self.allocated = self.freed = self.snapshots = 0
        monkeypatch.setattr(torch.cuda, "memory_snapshot", self.snapshot)
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", self.stats)

    def snapshot(self) -> list[dict[str, Any]]:
        self.snapshots += 1
        return [dict(segment) for segment in self.segments]

    def stats(self, _: Any) -> dict[str, Any]:
        counts = {"allocated": self.allocated, "freed": self.freed}
        current = sum(segment["total_size"] for segment in self.segments)
        return {"reserved_bytes": {"all": {**counts, "current": current}}}

    def take(self, pool: tuple[int, int], address: int, size: int) -> None:
        self.segments.append({"segment_pool_id": pool, "address": address, "total_size": size})
        self.allocated += size

    def give_back(self, address: int) -> None:
        [gone] = [segment for segment in self.segments if segment["address"] == address]
        self.segments.remove(gone)
        self.freed += gone["total_size"]


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    return Allocator(monkeypatch)


@pytest.fixture
def segments() -> PoolSegments:
    found = PoolSegments(torch.device("cuda", 0))
    found.add(OURS)
    return found


def test_only_the_pools_own_segments_count(allocator: Allocator, segments: PoolSegments) -> None:
    assert segments.bytes == 0
    allocator.take(OTHERS, 0, 100)
    allocator.take(OURS, 100, 20)
    allocator.take(OURS, 200, 30)
    assert segments.bytes == 50
    places = (0, 99, 100, 119, 120, 199, 200, 229, 230)
    assert [place for place in places if segments.contains(place)] == [100, 119, 200, 229]
    segments.add(OTHERS)
    assert segments.bytes == 150


def test_it_looks_only_when_the_allocator_took_or_gave(allocator: Allocator, segments: PoolSegments) -> None:
    allocator.take(OURS, 100, 20)
    for _ in range(5):
        assert segments.bytes == 20
        assert not segments.contains(5000)
    assert allocator.snapshots == 1
    assert segments.contains(110)
    assert allocator.snapshots == 1


def test_one_that_goes_while_another_of_its_size_comes_is_noticed(
    allocator: Allocator, segments: PoolSegments
) -> None:
    allocator.take(OTHERS, 1000, 20)
    assert not segments.contains(5000)
    allocator.give_back(1000)
    allocator.take(OURS, 5000, 20)
    assert segments.contains(5000)
    assert segments.bytes == 20


def test_statistics_that_somebody_resets_are_noticed(allocator: Allocator) -> None:
    segments = PoolSegments(torch.device("cuda", 0))
    segments.add((0, 1))
    allocator.take((0, 1), 1000, 100)
    assert segments.bytes == 100
    allocator.allocated = 0
    allocator.take((0, 1), 2000, 100)
    assert segments.bytes == 200
