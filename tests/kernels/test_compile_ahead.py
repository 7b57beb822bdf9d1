"""Jobs run in processes of their own first, and here in any case."""

import os
import time
from pathlib import Path

import pytest

from ostinato.kernels import compile_ahead


def test_every_job_but_the_first_runs_in_a_child_and_then_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_ahead, "_SLOWEST_HIT_SECONDS", 0.0)
    collector = compile_ahead._Collector()

    def job(name: str) -> int:
        (tmp_path / f"{name}.{os.getpid()}").touch()
        return os.getpid()

    futures = [collector.submit(job, str(number)) for number in range(5)]
    assert not any(future.done() for future in futures)
    collector.run()
    here = os.getpid()
    assert [future.result() for future in futures] == [here] * 5
    for number in range(5):
        pids = {int(file.suffix[1:]) for file in tmp_path.glob(f"{number}.*")}
        assert here in pids
        assert len(pids) == (2 if number else 1), "one child did it too, but for the first"


def test_where_fewer_kernels_are_on_disk_than_jobs_all_run_in_children(tmp_path: Path) -> None:
    collector = compile_ahead._Collector()
    for number in range(40):
        collector.submit(lambda number=number: (tmp_path / f"{number}.{os.getpid()}").touch())
    collector.run(num_on_disk=39)
    for number in range(40):
        pids = {int(file.suffix[1:]) for file in tmp_path.glob(f"{number}.*")}
        assert os.getpid() in pids
        assert len(pids) == 2, "exactly one child did it"


def test_a_job_that_fails_in_a_child_does_not_keep_it_from_the_others(tmp_path: Path) -> None:
    collector = compile_ahead._Collector()
    here = os.getpid()

    def job(number: int) -> None:
        if number % 2 == 0:
            raise ValueError(number)
        if os.getpid() != here:
            (tmp_path / str(number)).touch()

    futures = [collector.submit(job, number) for number in range(40)]
    collector.run(num_on_disk=0)
    assert len(list(tmp_path.iterdir())) == 20
    assert sum(future.exception() is not None for future in futures) == 20


def test_where_everything_is_on_disk_nobody_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "_in_processes", lambda jobs: pytest.fail("forked"))
    collector = compile_ahead._Collector()
    futures = [collector.submit(os.getpid) for _ in range(5)]
    collector.run()
    assert {future.result() for future in futures} == {os.getpid()}


def test_a_job_that_fails_fails_here(tmp_path: Path) -> None:
    collector = compile_ahead._Collector()
    futures = [collector.submit(int, "x"), collector.submit(int, "7")]
    collector.run()
    with pytest.raises(ValueError, match="invalid literal"):
        futures[0].result()
    assert futures[1].result() == 7


def test_a_child_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "_PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(compile_ahead, "_SLOWEST_HIT_SECONDS", 0.0)
    here = os.getpid()

    def hang_in_a_child() -> str:
        while os.getpid() != here:
            time.sleep(1)
        return "done"

    collector = compile_ahead._Collector()
    futures = [collector.submit(hang_in_a_child) for _ in range(3)]
    started = time.monotonic()
    collector.run()
    assert time.monotonic() - started < 20
    assert [future.result() for future in futures] == ["done"] * 3
