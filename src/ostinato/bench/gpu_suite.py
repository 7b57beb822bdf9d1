"""Run the GPU suite on this machine and write what passed, with machine and versions.

ostinato bench gpu-suite benchmarks/results/gpu-suite-h200.json [--jobs 8] [--no-whole-models] [options]
ostinato bench gpu-suite benchmarks/results/gpu-suite-alone-h200.json -m alone
ostinato bench gpu-suite FILE --only test_lora,test_sleep

With several jobs the files run side by side, each in a process of its own, forked from one that has imported
torch and all else: a fifth of the time. What took longest according to RESULT_FILE, if it is there, begins
first. Whole models (`WHOLE_MODELS`) take long and may be left out, and so may what is marked `alone`, with
`--no-alone`; the result says so.
"""

import argparse
import collections
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from ..tools.machine import machine
from ..tools.results import write_json
from .repository import ROOT

WHOLE_MODELS = ("test_verify", "test_accuracy_models", "test_engine_full_size")
"""They get half of the memory, one after another beside all others. What is marked `alone`, because it
measures times, comes last."""
IMPORTED = (
    "hypothesis",
    "numpy",
    "pydantic",
    "tokenizers",
    "torch",
    "transformers.tokenization_utils_base",
    "triton.language",
    "ostinato.cli.main",
    "ostinato.engine.async_llm",
    "ostinato.engine.llm",
    "ostinato.graphs.training",
)
"""By the process that all others are forked from. It must not touch CUDA."""
PATIENCE_SECONDS = 400


def main(
    result_file: Path,
    jobs: int,
    options: list[str],
    *,
    without: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    alone: bool = True,
) -> int:
    """Run, and write what has ended after each file; 0 if everything passed."""
    took = json.loads(result_file.read_text())["seconds_of_modules"] if result_file.exists() else {}
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"), key=lambda file: -took.get(file.stem, 0.0))
    files = [file for file in files if file.stem not in without and (not only or file.stem in only)]
    groups = [[file] for file in files if file.stem not in WHOLE_MODELS] if jobs > 1 else [files]
    large = [[file] for file in files if file.stem in WHOLE_MODELS] if jobs > 1 else []
    began, codes, suites = time.perf_counter(), dict[str, int](), list[ElementTree.Element]()
    result: dict[str, Any] = {}
    if jobs > 1:
        # For the processes that are forked, before any of them imports torch. References compute on the CPU,
        # where as many threads as cores in each file mostly wait for each other.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // jobs)))
        options = [*options, "-o", "timeout=300"]  # in company a test takes longer
    run_beside = _run_forked if jobs > 1 and _forks_can_use_cuda() else _run

    def note(group: list[Path], code: int, report: Path) -> None:
        nonlocal result
        codes[group[0].stem] = code
        suites.extend([ElementTree.parse(report).getroot()[0]] if report.exists() else [])
        result = _summary(suites, codes) | {"jobs": jobs, "files": len(groups + large), "ended": len(codes)}
        result["left_out"] = list(without) + ([] if alone else ["what is marked alone"])
        result["seconds"] = round(time.perf_counter() - began, 1)
        result_file.parent.mkdir(parents=True, exist_ok=True)
        write_json(result, result_file)

    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(jobs) as small_lanes,
        ThreadPoolExecutor(1) as large_lane,
    ):
        running = {}
        for group in groups + large:
            report = Path(folder) / f"{group[0].stem}.xml"
            lane, share = (large_lane, 2) if group in large else (small_lanes, 2 * jobs if jobs > 1 else 1)
            running[lane.submit(run_beside, group, report, options, share)] = group, report
        for ended in as_completed(running):
            group, report = running[ended]
            note(group, ended.result(), report)
        if jobs > 1 and alone:
            report = Path(folder) / "alone.xml"
            timed = [ROOT / "tests" / "gpu"]
            note(timed, _run(timed, report, [*options, "-m", "alone"], 1), report)
    print(f"{result['total']} in {result['seconds']} s", *result["failed"], sep="\n")
    return 1 if any(codes.values()) else 0


def _summary(suites: list[ElementTree.Element], codes: dict[str, int]) -> dict[str, Any]:
    outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    seconds: dict[str, float] = collections.defaultdict(float)
    failed = [f"{name} ended with {code}" for name, code in codes.items() if code not in (0, 1)]
    for case in (case for suite in suites for case in suite.iter("testcase")):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcome = kinds.pop() if kinds else "passed"
        module = case.get("classname", "").split(".")[-1]
        outcomes[module][outcome] += 1
        seconds[module] += float(case.get("time", 0))
        if outcome in ("failure", "error"):
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    return {
        "command": "pytest tests/gpu",
        "machine": machine(),
        "total": dict(sum(outcomes.values(), collections.Counter[str]())),
        "failed": failed,
        "modules": {name: dict(counts) for name, counts in sorted(outcomes.items())},
        "seconds_of_modules": {
            name: round(spent, 1) for name, spent in sorted(seconds.items(), key=lambda each: -each[1])
        },
    }


def _run(files: list[Path], report: Path, options: list[str], share: int) -> int:
    """Its exit code; engines see one of `share` parts of the memory."""
    command = [sys.executable, "-m", "pytest", *map(str, files), "-q", f"--junitxml={report}", *options]
    environment = {**os.environ, "OSTINATO_GPU_TEST_SHARE": str(share)}
    done = subprocess.run(command, cwd=ROOT, capture_output=share > 1, text=True, env=environment)
    if done.returncode and done.stdout:
        print(done.stdout[-6000:], done.stderr[-1000:])
    return done.returncode


def _run_forked(files: list[Path], report: Path, options: list[str], share: int) -> int:
    """As `_run`, without the time that imports take."""
    output = report.with_suffix(".txt")
    arguments = [*map(str, files), "-q", f"--junitxml={report}", *options]
    process = FORKS.Process(target=_pytest, args=(arguments, output, share))
    process.start()
    process.join(PATIENCE_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    code = process.exitcode
    assert code is not None
    if code:
        print(output.read_text()[-6000:])
    return code


def _pytest(arguments: list[str], output: Path, share: int) -> None:
    os.environ["OSTINATO_GPU_TEST_SHARE"] = str(share)
    os.chdir(ROOT)
    with output.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    import pytest

    sys.exit(int(pytest.main(arguments)))


def _forks_can_use_cuda() -> bool:
    """Not if something that is imported has begun to use it."""
    FORKS.set_forkserver_preload(list(IMPORTED))
    process = FORKS.Process(target=_use_cuda)
    process.start()
    process.join()
    if process.exitcode:
        print("CUDA fails in forked processes: each file imports everything by itself", file=sys.stderr)
    return process.exitcode == 0


def _use_cuda() -> None:
    import torch

    torch.zeros(1, device="cuda").item()


FORKS = multiprocessing.get_context("forkserver")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result_file", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--no-whole-models", action="store_true")
    parser.add_argument("--no-alone", action="store_true")
    parser.add_argument("--only", default="", metavar="FILE,FILE")
    given, rest = parser.parse_known_args()
    left_out = WHOLE_MODELS if given.no_whole_models else ()
    chosen = tuple(filter(None, given.only.split(",")))
    sys.exit(
        main(given.result_file, given.jobs, rest, without=left_out, only=chosen, alone=not given.no_alone)
    )
