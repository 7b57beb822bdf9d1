"""Triton's own start runs in threads that are gone afterwards, and its errors are told."""

import threading

import pytest

from ostinato.kernels.compiling import triton_start


@pytest.fixture(autouse=True)
def nothing_begun():
    triton_start._begun.cache_clear()
    yield
    triton_start._begun.cache_clear()


def test_both_parts_run_beside_the_caller_and_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    by: dict[str, int] = {}
    both, go_on = threading.Barrier(3), threading.Event()

    def part(name: str) -> None:
        both.wait(10)
        go_on.wait(10)
        by[name] = threading.get_ident()

    monkeypatch.setattr(triton_start, "_hash_files", lambda: part("hash"))
    monkeypatch.setattr(triton_start, "_open_driver", lambda: part("driver"))
    before = threading.active_count()
    triton_start.begin()
    triton_start.begin()  # once is enough
    both.wait(10)  # both are under way at the same time, and this thread goes on
    assert not by
    go_on.set()
    triton_start.finish()
    assert set(by) == {"hash", "driver"}
    assert threading.get_ident() not in by.values()
    assert threading.active_count() == before, "nothing may be left that a fork could catch"


def test_what_goes_wrong_is_raised_in_the_end_and_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def fails_once() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("no C compiler")

    monkeypatch.setattr(triton_start, "_hash_files", int)
    monkeypatch.setattr(triton_start, "_open_driver", fails_once)
    triton_start.begin()
    with pytest.raises(RuntimeError, match="no C compiler"):
        triton_start.finish()
    triton_start.finish()
    assert len(tries) == 2


def test_the_key_that_a_launch_needs_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_on_disk = pytest.importorskip("triton.runtime.cache")
    made = []
    monkeypatch.setattr(kernels_on_disk, "triton_key", lambda: made.append(1))
    triton_start._hash_files()
    assert made
    monkeypatch.delattr(kernels_on_disk, "triton_key")
    triton_start._hash_files()
