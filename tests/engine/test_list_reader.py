"""Token ids of long lists, read in C: the same as without it, and never anything else than integers."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato.engine import list_reader
from ostinato.engine.list_reader import LONG, ListReader, Read, compiled
from ostinato.engine.token_ids import token_array

HEADERS = Path(sysconfig.get_paths()["include"]) / "Python.h"
needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None or not HEADERS.is_file(), reason="needs a C compiler and Python's headers"
)


class Number(IntEnum):
    SEVEN = 7


@pytest.fixture(scope="module")
def read() -> Read:
    return compiled()


@needs_compiler
def test_ids_are_those_of_the_list(read: Read) -> None:
    given = [0, 1, 7, 255, 256, 257, 32767, 32768, 65536, 151_935, 2**30 - 1, int("0"), 10**5 - 10**5]
    found = read(given)
    assert found is not None
    assert found.dtype == np.int32
    assert found.tolist() == given
    for length in (0, 1, 5, LONG):
        ids = np.random.default_rng(length).integers(0, 2**30, length).tolist()
        found = read(ids)
        assert found is not None
        assert found.tolist() == ids


@needs_compiler
@pytest.mark.parametrize(
    "other", [-1, -(2**31), 2**30, 2**31, 2**40, 2**70, True, None, 1.0, "7", np.int64(3), Number.SEVEN, [3]]
)
@pytest.mark.parametrize("at", [0, 3, 6])
def test_what_is_anything_else_is_left_to_others(read: Read, other: Any, at: int) -> None:
    ids: list[Any] = [5] * 7
    ids[at] = other
    assert read(ids) is None


@needs_compiler
def test_nobody_holds_what_was_read(read: Read) -> None:
    number = 123_456_789 + int("1")
    ids = [number] * LONG
    before = sys.getrefcount(number), sys.getrefcount(ids)
    assert read(ids) is not None
    assert (sys.getrefcount(number), sys.getrefcount(ids)) == before


@needs_compiler
def test_long_lists_are_read_with_it_once_it_is_there(monkeypatch: pytest.MonkeyPatch, read: Read) -> None:
    calls: list[int] = []

    def counted(ids: list[Any]) -> Any:
        calls.append(len(ids))
        return read(ids)

    reader = ListReader()
    monkeypatch.setattr(list_reader, "compiled", lambda: counted)
    monkeypatch.setattr("ostinato.engine.token_ids.reader", reader)
    long: list[Any] = list(range(LONG))
    while not calls:
        assert token_array(long).tolist() == long
    assert token_array([*long, True]).tolist() == [*long, 1]
    assert token_array([*long, 2**31]).dtype == np.int64
    assert token_array([*long, 2**31 - 1]).tolist() == [*long, 2**31 - 1]
    assert token_array(tuple(long)).tolist() == long
    with pytest.raises(TypeError):
        token_array([*long, 1.0])
    assert not token_array(long).flags.writeable
    assert token_array(long[:-1]).tolist() == long[:-1]
    assert set(calls) == {LONG, LONG + 1}


def test_without_a_compiler_lists_are_read_as_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    reader = ListReader()
    with caplog.at_level("INFO", logger="ostinato.engine"):
        reader._make()
    assert "no C compiler" in caplog.text
    assert reader.read([1] * LONG) is None
    monkeypatch.setenv("CC", "false")
    with pytest.raises(RuntimeError, match="cannot compile"):
        compiled()
