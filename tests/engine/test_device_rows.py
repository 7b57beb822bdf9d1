"""What the host writes into rows arrives on the device, whatever the order and number of writes."""

import itertools
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.engine.stepping.device_rows import DeviceRows, RowField
from ostinato.graphs import GraphMode, GraphPool

FIELDS = (
    RowField("lengths", torch.int32, advances=True),
    RowField("seeds", torch.int64),
    RowField("pages", torch.int32, 700),
    RowField("heat", torch.float32, initial=1),
)
NUM_ROWS = 9


def make_rows(mode: GraphMode = GraphMode.FULL_DECODE_ONLY) -> DeviceRows:
    rows = DeviceRows(FIELDS, NUM_ROWS, GraphPool("cpu"), mode, 0)
    rows.capture()
    return rows


def test_rows_begin_with_their_initial_values() -> None:
    rows = make_rows()
    assert rows["heat"].tolist() == [1.0] * NUM_ROWS
    assert not rows["pages"].any()
    assert rows["pages"].shape == (NUM_ROWS, 700)
    assert rows["seeds"].dtype is torch.int64


def test_nothing_arrives_before_send() -> None:
    rows = make_rows()
    rows.write("heat", 3, 0.5)
    assert rows["heat"][3] == 1.0
    rows.send()
    assert rows["heat"].tolist() == [1, 1, 1, 0.5, 1, 1, 1, 1, 1]


def test_what_the_device_moves_on_is_sent_even_if_it_looks_unchanged() -> None:
    rows = make_rows()
    rows.write("lengths", 2, 7)
    rows.send()
    rows["lengths"][2] += 5
    rows.write("lengths", 2, 7)
    rows.send()
    assert rows["lengths"][2] == 7


def test_a_value_that_the_row_has_already_is_not_sent() -> None:
    rows = make_rows()
    rows.write("heat", 4, 0.25)
    rows.send()
    rows["heat"][4] = 99.0  # nobody does this: it shows that the second write sends nothing
    rows.write("heat", 4, 0.25)
    rows.send()
    assert rows["heat"][4] == 99.0


def test_of_equal_places_the_last_write_counts() -> None:
    rows = make_rows()
    rows.write_cells("pages", [1, 1, 2], [0, 0, 5], [10, 11, 12])
    rows.write("pages", 2, [13, 14], first=5)
    rows.send()
    assert rows["pages"][1, 0] == 11
    assert rows["pages"][2, 5:7].tolist() == [13, 14]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("piece", [0, 1, 2])
@pytest.mark.parametrize("is_after", [False, True])
def test_what_could_not_be_sent_is_sent_next_time(
    error: type[BaseException], piece: int, is_after: bool
) -> None:
    """Of 10,000 cells in three pieces one piece fails, before or behind its copy."""
    rows = DeviceRows((RowField("pages", torch.int32, 1250),), NUM_ROWS, GraphPool("cpu"), GraphMode.NONE, 0)
    values = np.arange(10_000).reshape(8, 1250) + 7
    for row in range(8):
        rows.write("pages", row + 1, values[row])
    run, pieces = rows.scatter.run, itertools.count()

    def run_or_fail(*args: Any) -> Any:
        fails = next(pieces) == piece
        if fails and not is_after:
            raise error
        found = run(*args)
        if fails:
            raise error
        return found

    with patch.object(rows.scatter, "run", run_or_fail):
        with pytest.raises(error):
            rows.send()
        rows.write("pages", 1, values[0])  # known to the host already
        rows.write("pages", 2, [1, 2, 3], first=9)
        rows.send()
    values[1, 9:12] = [1, 2, 3]
    assert np.array_equal(rows["pages"][1:].numpy(), values)
    assert not rows["pages"][0].any()


writes = st.one_of(
    st.tuples(st.just("heat"), st.integers(1, 8), st.sampled_from([0.0, 0.5, 1.0, -3.25])),
    st.tuples(st.just("seeds"), st.integers(1, 8), st.integers(-(2**63), 2**63 - 1)),
    st.tuples(st.just("lengths"), st.integers(1, 8), st.integers(0, 2**31 - 1)),
    st.tuples(
        st.just("pages"),
        st.integers(1, 8),
        st.tuples(st.integers(0, 300), st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=400)),
    ),
    st.just("send"),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(writes, max_size=25), st.sampled_from([GraphMode.NONE, GraphMode.FULL_DECODE_ONLY]))
def test_any_sequence_of_writes_arrives(sequence: list, mode: GraphMode) -> None:  # type: ignore[type-arg]
    rows = make_rows(mode)
    expected = {
        "heat": np.ones(NUM_ROWS, np.float32),
        "seeds": np.zeros(NUM_ROWS, np.int64),
        "lengths": np.zeros(NUM_ROWS, np.int32),
        "pages": np.zeros((NUM_ROWS, 700), np.int32),
    }
    for write in [*sequence, "send"]:
        if write == "send":
            rows.send()
            continue
        name, row, value = write
        if name == "pages":
            first, pages = value
            rows.write(name, row, pages, first)
            expected[name][row, first : first + len(pages)] = pages
        else:
            rows.write(name, row, value)
            expected[name][row] = value
    for name, values in expected.items():
        assert np.array_equal(rows[name].numpy(), values), name
