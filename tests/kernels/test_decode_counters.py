"""Counters of decode attention live as long as the keys they are for."""

import gc

import pytest
import torch

from ostinato.kernels.attention import cuda_decode


@pytest.fixture(autouse=True)
def no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_decode, "_counters_of_caches", {})


def keys(layers: int = 3) -> list[torch.Tensor]:
    return [torch.zeros(8, 16, 2, 4) for _ in range(layers)]


def test_engines_that_come_and_go_leave_no_counters() -> None:
    kept = []
    for _ in range(5):
        caches = keys()
        kept.append(torch.zeros(1000))  # the next caches lie elsewhere
        for cache in caches:
            cuda_decode.counters_of(cache)
        assert len(cuda_decode._counters_of_caches) <= 6
        del cache, caches
        gc.collect()
    cuda_decode.counters_of(keys(1)[0])
    assert len(cuda_decode._counters_of_caches) == 1


def test_keys_have_the_same_counters_as_long_as_they_are_there() -> None:
    first, second = keys(2)
    counters = cuda_decode.counters_of(first)
    assert cuda_decode.counters_of(second) is not counters
    for _ in range(10):
        cuda_decode.counters_of(keys(1)[0])
    assert cuda_decode.counters_of(first) is counters
    assert cuda_decode.counters_of(first[:]) is counters, "a view of the same keys"


def test_layers_in_one_memory_have_counters_of_their_own() -> None:
    arena = torch.zeros(2, 8, 16, 2, 4)
    assert cuda_decode.counters_of(arena[0]) is not cuda_decode.counters_of(arena[1])
