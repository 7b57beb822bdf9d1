"""Jobs run in processes of their own first, and here in any case."""

import functools
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ostinato.kernels import compile_ahead
from ostinato.kernels.cuda import compiled


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


def test_cuda_sources_are_compiled_by_children_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setattr(compiled, "_cache_folder", lambda: tmp_path / "kept")
    compile_here, here = compiled._compile, os.getpid()

    def noted(*args: Any) -> tuple[bytes, str]:
        (tmp_path / f"by.{os.getpid()}").touch()
        return compile_here(*args)

    monkeypatch.setattr(compiled, "_compile", noted)
    (tmp_path / "sources").mkdir()
    monkeypatch.setattr(compiled, "_FOLDER", tmp_path / "sources")
    (tmp_path / "sources" / "one.cu").write_text('extern "C" __global__ void one(int* x) { *x = VALUE; }')
    kernels = [compiled.CudaKernel("one.cu", "one", {"VALUE": value}) for value in range(3)]
    collector = compile_ahead._Collector()
    jobs = [functools.partial(kernel.compile, (9, 0)) for kernel in kernels]
    collector.submit(int)
    collector.run(num_on_disk=0, beside=jobs)
    assert len(list((tmp_path / "kept").iterdir())) == 3
    found = [job() for job in jobs]
    assert all(found)
    assert not (tmp_path / f"by.{here}").exists(), "nothing was left to do here"
