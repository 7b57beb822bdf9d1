"""Run the GPU suite on this machine and write what passed, with machine and versions.

python benchmarks/gpu_suite.py benchmarks/results/gpu-suite-h200.json [--jobs 8] [--no-whole-models] [options]
python benchmarks/gpu_suite.py benchmarks/results/gpu-suite-alone-h200.json -m alone

With several jobs the files run side by side, each in a process of its own: a third of the time. Whole models
(`WHOLE_MODELS`) take half of that and may be left out, and so may what is marked `alone`, with `--no-alone`;
the result says so.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from ostinato.tools.machine import machine

ROOT = Path(__file__).parents[1]
WHOLE_MODELS = ("test_verify", "test_accuracy_models", "test_engine_full_size")
"""They get half of the memory, one after another beside all others. What is marked `alone`, because it
measures times, comes last."""
LONGEST = (
    "test_cascade",
    "test_fragments",
    "test_engine",
    "test_wide",
    "test_streamed",
    "test_training",
    "test_lora",
    "test_lora_kernels",
    "test_speculation_engine",
    "test_sleep",
    "test_cuda_prompts",
    "test_prompt_products",
    "test_training_surroundings",
)
"""Begun first."""


def main(
    result_file: Path, jobs: int, options: list[str], *, without: tuple[str, ...] = (), alone: bool = True
) -> int:
    """Run, and write what has ended after each file; 0 if everything passed."""
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"), key=lambda file: file.stem not in LONGEST)
    files = [file for file in files if file.stem not in without]
    groups = [[file] for file in files if file.stem not in WHOLE_MODELS] if jobs > 1 else [files]
    large = [[file] for file in files if file.stem in WHOLE_MODELS] if jobs > 1 else []
    began, codes, suites = time.perf_counter(), dict[str, int](), list[ElementTree.Element]()
    result: dict[str, Any] = {}

    def note(group: list[Path], code: int, report: Path) -> None:
        nonlocal result
        codes[group[0].stem] = code
        suites.extend([ElementTree.parse(report).getroot()[0]] if report.exists() else [])
        result = _summary(suites, codes) | {"jobs": jobs, "files": len(groups + large), "ended": len(codes)}
        result["left_out"] = list(without) + ([] if alone else ["what is marked alone"])
        result["seconds"] = round(time.perf_counter() - began, 1)
        result_file.parent.mkdir(parents=True, exist_ok=True)
        result_file.write_text(json.dumps(result, indent=2) + "\n")

    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(jobs) as small_lanes,
        ThreadPoolExecutor(1) as large_lane,
    ):
        running = {}
        for group in groups + large:
            report = Path(folder) / f"{group[0].stem}.xml"
            lane, share = (large_lane, 2) if group in large else (small_lanes, 2 * jobs if jobs > 1 else 1)
            running[lane.submit(_run, group, report, options, share)] = group, report
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
    seconds = collections.Counter[str]()
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
        "seconds_of_modules": {name: round(spent, 1) for name, spent in seconds.most_common()},
    }


def _run(files: list[Path], report: Path, options: list[str], share: int) -> int:
    """Its exit code; engines see one of `share` parts of the memory."""
    command = [sys.executable, "-m", "pytest", *map(str, files), "-q", f"--junitxml={report}", *options]
    environment = {**os.environ, "OSTINATO_GPU_TEST_SHARE": str(share)}
    done = subprocess.run(command, cwd=ROOT, capture_output=share > 1, text=True, env=environment)
    if done.returncode and done.stdout:
        print(done.stdout[-6000:], done.stderr[-1000:])
    return done.returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result_file", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--no-whole-models", action="store_true")
    parser.add_argument("--no-alone", action="store_true")
    given, rest = parser.parse_known_args()
    left_out = WHOLE_MODELS if given.no_whole_models else ()
    sys.exit(main(given.result_file, given.jobs, rest, without=left_out, alone=not given.no_alone))
