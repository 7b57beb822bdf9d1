"""What a graph serves and what a batch needs, as keys."""

from dataclasses import FrozenInstanceError
from itertools import combinations
from typing import Any

import pytest

from ostinato.graphs.dispatching.descriptor import BatchDescriptor, BatchShape
from ostinato.graphs.errors import BatchError, ConfigError


def test_descriptors_say_what_they_serve() -> None:
    assert str(BatchDescriptor.decode(8)) == "decode 8x1"
    assert str(BatchDescriptor.decode(6, 3, lora=4, context=4096)) == "decode 6x3 lora<=4 context<=4096"
    assert str(BatchDescriptor(512, 64)) == "mixed 512 tokens/64 reqs"
    assert str(BatchDescriptor.decode(2, cascade=True, extra="a")) == "decode 2x1 cascade extra='a'"
    assert str(BatchShape.decode(7, 2, lora=1, context=90)) == "decode 7x2 lora=1 context=90"
    assert str(BatchShape(9, 2, cascade=True, extra=(1, 2))) == "mixed 9 tokens/2 reqs cascade extra=(1, 2)"


def test_decode_multiplies_requests_by_the_query_length() -> None:
    assert BatchDescriptor.decode(6, 3) == BatchDescriptor(18, 6, 3)
    more: dict[str, Any] = {"lora": 2, "cascade": True, "context": 9, "extra": "a"}
    assert BatchDescriptor.decode(4, 3, **more) == BatchDescriptor(12, 4, 3, **more)
    assert BatchShape.decode(4, 3, **more) == BatchShape(12, 4, 3, **more)
    assert BatchShape.decode(4, 3, **more).as_descriptor() == BatchDescriptor(12, 4, 3, **more)


@pytest.mark.parametrize(
    "counts", [(0, 0), (0, 1), (1, 0), (-1, -1), (2, 3), (8, 4, 3), (4, 4, 0), (4, 4, -1), (4, 5, 1)]
)
def test_impossible_counts_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        BatchDescriptor(*counts)
    with pytest.raises(BatchError):
        BatchShape(*counts)


def test_negative_extras_are_refused() -> None:
    with pytest.raises(ConfigError):
        BatchDescriptor(1, 1, lora=-1)
    for context in (0, -1):
        with pytest.raises(ConfigError):
            BatchDescriptor(1, 1, context=context)
    with pytest.raises(BatchError):
        BatchShape(1, 1, lora=-1)
    with pytest.raises(BatchError):
        BatchShape(1, 1, context=-1)


def test_descriptors_are_frozen_hashable_and_ordered() -> None:
    cheap_to_dear = [
        BatchDescriptor.decode(4),
        BatchDescriptor(4, 4),
        BatchDescriptor.decode(4, lora=2),
        BatchDescriptor.decode(8, context=64),
        BatchDescriptor.decode(4, 2),
        BatchDescriptor.decode(8),
        BatchDescriptor(8, 2),
    ]
    assert sorted({*cheap_to_dear}) == cheap_to_dear
    assert cheap_to_dear[0] < cheap_to_dear[1] <= cheap_to_dear[1]
    assert len({*cheap_to_dear, BatchDescriptor(4, 4, 1)}) == len(cheap_to_dear)
    with pytest.raises(FrozenInstanceError):
        cheap_to_dear[0].num_tokens = 5  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        BatchShape(1, 1).num_tokens = 5  # type: ignore[misc]


@pytest.mark.parametrize("extras", [(None, "a", "b"), (1, None, "a"), ((1, "a"), 2, frozenset({3}))])
def test_descriptors_order_whatever_their_extras_are(extras: tuple[Any, ...]) -> None:
    descriptors = [BatchDescriptor.decode(4, extra=extra) for extra in extras]
    for one, other in combinations(descriptors, 2):
        assert (one < other) is not (other < one)
    assert max(descriptors) < BatchDescriptor.decode(5)


def test_several_tokens_of_one_request_are_alone() -> None:
    assert BatchDescriptor(16, 1).is_alone
    assert not BatchDescriptor(1, 1).is_alone
    assert not BatchDescriptor(16, 2).is_alone
    assert not BatchDescriptor.decode(1, 5).is_alone
