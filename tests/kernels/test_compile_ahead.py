"""Jobs run in processes of their own first, and here in any case."""

import functools
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.kernels.compiling import compile_ahead, compiling_processes
from ostinato.kernels.cuda import compiled

MakeCollector = Callable[..., compile_ahead._Collector]


@pytest.fixture
def new_collector() -> Iterator[MakeCollector]:
    """As it is made for a compilation; `num_on_disk` as it was found."""
    processes = compiling_processes.CompilingProcesses()
    yield lambda num_on_disk=None: compile_ahead._Collector(processes, num_on_disk)
    processes.end()


def test_every_job_but_the_first_runs_in_a_child_and_then_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_collector: MakeCollector
) -> None:
    monkeypatch.setattr(compile_ahead, "_SLOWEST_HIT_SECONDS", 0.0)
    collector = new_collector()

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


def test_kernels_of_another_model_on_disk_are_no_reason_to_compile_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_collector: MakeCollector
) -> None:
    """Two models may have the first kernel in common, and no others."""
    collector, now = new_collector(num_on_disk=100), [0.0]
    monkeypatch.setattr(compile_ahead, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def job(number: int) -> None:
        (tmp_path / f"{number}.{os.getpid()}").touch()
        now[0] += number

    for number in range(5):
        collector.submit(job, number)
    collector.begin()
    collector.run()
    assert [len(list(tmp_path.glob(f"{number}.*"))) for number in range(5)] == [1, 1, 2, 2, 2]


def test_where_fewer_kernels_are_on_disk_than_jobs_all_run_in_children(
    tmp_path: Path, new_collector: MakeCollector
) -> None:
    collector = new_collector(num_on_disk=39)
    for number in range(40):
        collector.submit(lambda number=number: (tmp_path / f"{number}.{os.getpid()}").touch())
    collector.begin()
    collector.run()
    for number in range(40):
        pids = {int(file.suffix[1:]) for file in tmp_path.glob(f"{number}.*")}
        assert os.getpid() in pids
        assert len(pids) == 2, "exactly one child did it"


def test_the_longest_jobs_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_collector: MakeCollector
) -> None:
    costs = [3, 1, 9, 4, 1, 5, 8, 2]

    def job(cost: int) -> None:
        with open(tmp_path / str(os.getpid()), "a") as log:
            log.write(f"{cost} ")
        while cost == 9 and len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)  # nobody else has begun

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    collector = new_collector(num_on_disk=0)
    for cost in costs[:5]:
        collector.cost = cost
        collector.submit(job, cost)
    for cost in costs[5:]:
        collector.add(compile_ahead.Job(cost, functools.partial(job, cost)))
    collector.begin()
    collector.run()
    logs = [[int(cost) for cost in file.read_text().split()] for file in tmp_path.iterdir()]
    children = [log for log in logs if log != costs[:5]]
    assert len(children) == 2
    assert sorted(cost for log in children for cost in log) == sorted(costs)
    assert all(log == sorted(log, reverse=True) for log in children)
    assert {log[0] for log in children} == {9, 8}


def test_long_jobs_do_not_wait_for_others_where_they_are_not_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_collector: MakeCollector
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)

    def job(name: str) -> None:
        (tmp_path / f"{name}.{os.getpid()}").touch()

    def submit(collector: compile_ahead._Collector, name: str, cost: int) -> None:
        collector.cost = cost
        collector.submit(job, name)

    def wait_for(name: str) -> None:
        while not list(tmp_path.glob(f"{name}.*")):
            time.sleep(0.01)

    collector = new_collector(num_on_disk=2)
    submit(collector, "perhaps on disk", compile_ahead._LONG)
    submit(collector, "short", compile_ahead._LONG - 1)
    assert not collector._begun
    submit(collector, "long", compile_ahead._LONG)
    collector.add(compile_ahead.Job(compile_ahead._LONG, functools.partial(job, "long too")))
    wait_for("long")
    wait_for("long too")
    assert not list(tmp_path.glob("short.*"))
    collector.begin()
    wait_for("short")
    wait_for("perhaps on disk")
    collector.run()
    here = os.getpid()
    for name in ("long", "short", "perhaps on disk"):
        pids = {int(file.suffix[1:]) for file in tmp_path.glob(f"{name}.*")}
        assert here in pids
        assert len(pids) == 2, "one child did it"
    assert len(list(tmp_path.glob("long too.*"))) == 1


def test_who_cannot_wait_for_a_kernel_compiles_it(new_collector: MakeCollector) -> None:
    """Nothing else would: it would be waited for forever."""
    collector, calls = new_collector(num_on_disk=0), []
    pending = collector.submit(lambda: calls.append(os.getpid()) or "compiled")
    assert pending.result() == "compiled"
    collector.run()
    assert (pending.result(), calls) == ("compiled", [os.getpid()])


def test_a_source_takes_as_long_as_all_that_is_compiled_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        "a.cu": '#include "b.cuh"\n#include "c.cuh"\n',
        "b.cuh": '#include "c.cuh"\n// b\n',
        "c.cuh": "// c\n",
        "unused.cuh": "// long, and in nobody's way\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(compiled, "_FOLDER", tmp_path)
    kernel = compiled.CudaKernel("a.cu", "a", {})
    length = sum(len(texts[name]) for name in ("a.cu", "b.cuh", "c.cuh"))
    assert kernel.compile_cost == length
    monkeypatch.setitem(compiled._UNROLLED, "a.cu", 3)
    assert kernel.compile_cost == 3 * length, "what the compiler unrolls takes longer"


def test_a_triton_kernel_takes_as_long_as_all_that_it_calls() -> None:
    pytest.importorskip("triton")
    from ostinato.kernels.sampling.filters import triton_meeting, triton_search

    length = compile_ahead._length_inlined
    assert length(triton_search.key_of) == len(triton_search.key_of.src), "it calls none"
    assert length(triton_meeting.meet) == len(triton_meeting.meet.src), "what is Triton's own does not count"
    called = {name: length(vars(triton_search)[name]) for name in ("even_keys", "weights_from", "narrowed")}
    assert length(triton_search.search) == len(triton_search.search.src) + sum(called.values())
    twice = 2 * length(triton_search.value_of)
    others = length(triton_search.even_keys) + length(triton_search.key_of)
    assert length(triton_search.even_values) == len(triton_search.even_values.src) + twice + others


def test_what_takes_longest_to_compile_is_there() -> None:
    assert all(compiled.source(name) for name in compiled._UNROLLED)


def test_children_build_the_launchers_of_triton_kernels_too_one_for_each_list_of_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_collector: MakeCollector
) -> None:
    triton = pytest.importorskip("triton")
    here = os.getpid()

    def launcher(src: Any, metadata: str) -> None:
        (tmp_path / f"{'-'.join(src.signature.values())}.{os.getpid()}").touch()

    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(launcher_cls=launcher))
    collector = new_collector(num_on_disk=0)
    for kind in ("i32", "bf16", "i32", "i32", "bf16"):
        src = SimpleNamespace(signature={"x": "pointer", "n": kind})
        collector.submit(SimpleNamespace, src=src, metadata="of the kernel")
    collector.submit(bytes)
    collector.begin()
    collector.run()
    assert sorted(file.stem for file in tmp_path.iterdir()) == ["pointer-bf16", "pointer-i32"]
    assert not list(tmp_path.glob(f"*.{here}")), "the first launch does it, where no child did"


def test_nothing_is_launched_inside_but_by_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    launched: list[tuple[str, bool]] = []
    loaded: list[object] = []

    class Kernel:
        __name__ = "kernel"
        src = "def kernel(): pass"

        def launch(self, name: str) -> None:
            triton.runtime.JITFunction.run(self, name, grid=(1,), warmup=False)

    def run(self: Kernel, name: str, *, grid: tuple[int], warmup: bool) -> Kernel:
        launched.append((name, warmup))
        return self

    monkeypatch.setattr(triton.runtime.JITFunction, "run", run)
    monkeypatch.setattr(compile_ahead.triton_start, "finish", lambda: None)
    monkeypatch.setattr(compile_ahead, "_load", lambda kernel, device: loaded.append(kernel))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    kernel = Kernel()
    with compile_ahead.compiling_only(torch.device("cuda", 0)):
        kernel.launch("here")
        kernel.launch("here")
        other = threading.Thread(target=kernel.launch, args=("another thread",))
        other.start()
        other.join()
        assert compiled.is_compiling_only()
    kernel.launch("later")
    assert launched == [("here", True), ("here", True), ("another thread", False), ("later", False)]
    assert loaded == [kernel]
    assert not compiled.is_compiling_only()


@pytest.mark.parametrize("launches", [0, 2])
def test_tritons_own_start_is_over_before_a_kernel_is_compiled_and_before_a_fork(
    launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    happened: list[str] = []
    monkeypatch.setattr(triton.runtime.JITFunction, "run", lambda *_, **__: happened.append("compile"))
    monkeypatch.setattr(compile_ahead.triton_start, "finish", lambda: happened.append("ready"))
    monkeypatch.setattr(compile_ahead._Collector, "begin", lambda *_: happened.append("fork"))
    monkeypatch.setattr(compile_ahead._Collector, "run", lambda *_: None)
    monkeypatch.setattr(compile_ahead, "_load", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with compile_ahead.compiling_only(torch.device("cuda", 0)):
        happened.append("work that needs no Triton")
        for _ in range(launches):
            triton.runtime.JITFunction.run(
                type("Kernel", (), {"src": "", "__name__": "kernel"})(), grid=(1,), warmup=False
            )
    assert happened == ["work that needs no Triton", "ready", *["compile"] * launches, "fork"]


def test_a_job_that_fails_in_a_child_does_not_keep_it_from_the_others(
    tmp_path: Path, new_collector: MakeCollector
) -> None:
    collector = new_collector(num_on_disk=0)
    here = os.getpid()

    def job(number: int) -> None:
        if number % 2 == 0:
            raise ValueError(number)
        if os.getpid() != here:
            (tmp_path / str(number)).touch()

    futures = [collector.submit(job, number) for number in range(40)]
    collector.begin()
    collector.run()
    assert len(list(tmp_path.iterdir())) == 20
    assert sum(future.exception() is not None for future in futures) == 20


@pytest.mark.parametrize("num_on_disk", [None, 5])
def test_where_everything_is_on_disk_nobody_is_forked(
    monkeypatch: pytest.MonkeyPatch, new_collector: MakeCollector, num_on_disk: int | None
) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    collector = new_collector(num_on_disk)
    collector.cost = compile_ahead._LONG
    futures = [collector.submit(os.getpid) for _ in range(5)]
    collector.begin()
    collector.run()
    assert {future.result() for future in futures} == {os.getpid()}


def test_a_job_that_fails_fails_here(tmp_path: Path, new_collector: MakeCollector) -> None:
    collector = new_collector()
    futures = [collector.submit(int, "x"), collector.submit(int, "7")]
    collector.run()
    with pytest.raises(ValueError, match="invalid literal"):
        futures[0].result()
    assert futures[1].result() == 7


def test_a_child_that_hangs_is_given_up(
    monkeypatch: pytest.MonkeyPatch, new_collector: MakeCollector, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiling_processes, "_PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(compile_ahead, "_SLOWEST_HIT_SECONDS", 0.0)
    here = os.getpid()

    def hang_in_a_child() -> str:
        while os.getpid() != here:
            time.sleep(1)
        return "done"

    collector = new_collector()
    futures = [collector.submit(hang_in_a_child) for _ in range(3)]
    started = time.monotonic()
    collector.run()
    assert time.monotonic() - started < 20
    assert [future.result() for future in futures] == ["done"] * 3
    assert "given up after" in caplog.text


def test_a_process_that_somebody_has_waited_for_is_not_killed(
    monkeypatch: pytest.MonkeyPatch, children: list[int]
) -> None:
    """Another one may have its number."""
    processes = compiling_processes.CompilingProcesses()
    processes._limit = 2
    processes.begin([compiling_processes.Job(1, int)])
    os.waitpid(children[0], 0)
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("killed"))
    processes.end()


def test_processes_end_with_one_that_is_killed() -> None:
    """They have its memory on the GPU, and its sockets."""
    given, taken = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            os.close(given)
            processes = compiling_processes.CompilingProcesses()
            processes._limit = 2
            processes.begin([compiling_processes.Job(1, lambda: os.write(taken, b"x") and time.sleep(30))])
            time.sleep(30)
        finally:
            os._exit(0)
    os.close(taken)
    assert os.read(given, 1) == b"x"
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert select.select([given], [], [], 10)[0], "nobody has the other end"
    assert os.read(given, 1) == b""
    os.close(given)


def test_cuda_sources_are_compiled_by_children_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_collector: MakeCollector
) -> None:
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
    collector = new_collector(num_on_disk=0)
    jobs = [functools.partial(kernel.compile, (9, 0)) for kernel in kernels]
    collector.submit(int)
    for job in jobs:
        collector.add(compile_ahead.Job(1, job))
    collector.begin()
    collector.run()
    assert len(list((tmp_path / "kept").iterdir())) == 3
    found = [job() for job in jobs]
    assert all(found)
    assert not (tmp_path / f"by.{here}").exists(), "nothing was left to do here"


def no_room(*_: Any, **__: Any) -> Any:
    raise OSError(28, "no room")


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Whom this process forks from now on."""
    forked: list[int] = []
    fork = os.fork

    def noted() -> int:
        child = fork()
        forked.append(child)
        return child

    monkeypatch.setattr(os, "fork", noted)
    return forked


def is_gone(child: int) -> bool:
    try:
        os.waitpid(child, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


@pytest.fixture
def postponed_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs two jobs as kernels are compiled, with Triton's own way to postpone them; what they returned."""
    pytest.importorskip("triton")
    mode = pytest.importorskip("triton.runtime._async_compile")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "nothing here"))
    monkeypatch.setattr(compile_ahead.triton_start, "finish", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))

    def run(body: Any = lambda: None) -> list[int]:
        found: list[int] = []
        with compile_ahead.compiling_only(torch.device("cuda")):
            for name in ("one", "other"):
                job = functools.partial(len, name)
                mode.active_mode.get().submit(name, job, found.append, lambda _: None)
            body()
        return sorted(found)

    return run


@pytest.mark.parametrize("where", ["os.fork", "os.pipe", "tempfile.TemporaryDirectory"])
def test_without_room_for_processes_everything_is_compiled_here(
    postponed_jobs: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(f"ostinato.kernels.compiling.compiling_processes.{where}", no_room)
    assert postponed_jobs() == [3, 5]


def test_an_interrupt_while_children_compile_is_seen_at_once_and_leaves_none(
    postponed_jobs: Any, children: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_ahead.CompilingProcesses, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        postponed_jobs()
    assert len(children) == 2
    assert all(map(is_gone, children))


@pytest.mark.parametrize("error", [None, ValueError("no such weight")])
def test_processes_compile_while_something_else_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[int], error: Exception | None
) -> None:
    """And end with it, if it fails."""
    pytest.importorskip("triton")
    mode = pytest.importorskip("triton.runtime._async_compile")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "nothing here"))
    monkeypatch.setattr(compile_ahead.triton_start, "finish", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    here, done, found = os.getpid(), tmp_path / "done", list[int]()

    def job() -> int:
        if os.getpid() != here:
            done.touch()
            time.sleep(30 if error else 0)
        return os.getpid()

    began = time.monotonic()
    with (
        pytest.raises(ValueError, match="no such weight") if error else nullcontext(),
        compile_ahead.Compilation(torch.device("cuda")) as compilation,
    ):
        with compilation.collecting():
            mode.active_mode.get().submit("name", job, found.append, lambda _: None)
        assert not done.exists()
        compilation.begin()
        while not done.exists():
            time.sleep(0.01)
        assert not found
        if error:
            raise error
    assert found == ([] if error else [here])
    assert time.monotonic() - began < 20
    assert mode.active_mode.get() is None
    assert children
    assert all(map(is_gone, children))


def test_an_error_inside_is_seen_and_compiles_nothing(postponed_jobs: Any) -> None:
    def fail() -> None:
        raise ValueError("in the step")

    with pytest.raises(ValueError, match="in the step"):
        postponed_jobs(fail)


def test_a_kernel_that_was_given_up_is_compiled_by_its_next_launch() -> None:
    FutureKernel = type("FutureKernel", (), {})
    kernels = {"ready": object(), "given up": FutureKernel()}
    compile_ahead._forget_unfinished([SimpleNamespace(device_caches={0: (kernels, "target")})])
    assert list(kernels) == ["ready"]


def test_threads_collect_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(compile_ahead.triton_start, "finish", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    launch = triton.runtime.JITFunction.run
    inside, after = threading.Event(), threading.Event()
    seen: list[bool] = []

    def first() -> None:
        with compile_ahead.Compilation(torch.device("cuda")) as compilation:
            with compilation.collecting():
                inside.set()
                time.sleep(0.2)
            seen.append(after.wait(0.2))

    def second() -> None:
        inside.wait()
        with compile_ahead.compiling_only(torch.device("cuda")):
            after.set()
            time.sleep(0.3)
            seen.append(triton.runtime.JITFunction.run is launch)

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [False, False], "the second one must not get kernels of the first, and launch nothing"
    assert triton.runtime.JITFunction.run is launch
