"""Run the GPU suite on this machine and write what passed, with machine and versions.

python benchmarks/gpu_suite.py benchmarks/results/gpu-suite-h200.json [--jobs 8] [pytest's options]

With several jobs the files run side by side, each in a process of its own: a third of the time.
"""

import argparse
import collections
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ostinato.tools.machine import machine

ROOT = Path(__file__).parents[1]
LONGEST = ("test_verify", "test_cascade", "test_fragments", "test_engine", "test_wide", "test_streamed")
"""Begun first."""


def main(result_file: Path, jobs: int, options: list[str]) -> int:
    """Run, summarise, write; 0 if everything passed."""
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"), key=lambda file: file.stem not in LONGEST)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        groups = [[file] for file in files] if jobs > 1 else [files]
        reports = [Path(folder) / f"{number}.xml" for number in range(len(groups))]
        codes = list(pool.map(lambda pair: _run(*pair, options), zip(groups, reports, strict=True)))
        suites = [ElementTree.parse(report).getroot()[0] for report in reports if report.exists()]
    outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    failed = [
        f"{group[0].stem} ended with {code}" for group, code in zip(groups, codes, strict=True) if code > 1
    ]
    for case in (case for suite in suites for case in suite.iter("testcase")):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcome = kinds.pop() if kinds else "passed"
        outcomes[case.get("classname", "").split(".")[-1]][outcome] += 1
        if outcome in ("failure", "error"):
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    total = sum(outcomes.values(), collections.Counter[str]())
    result = {
        "command": "pytest tests/gpu",
        "jobs": jobs,
        "machine": machine(),
        "seconds": round(time.perf_counter() - began, 1),
        "total": dict(total),
        "failed": failed,
        "modules": {name: dict(counts) for name, counts in sorted(outcomes.items())},
    }
    result_file.parent.mkdir(parents=True, exist_ok=True)
    result_file.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{dict(total)} in {result['seconds']} s", *failed, sep="\n")
    return 1 if failed or any(codes) else 0


def _run(files: list[Path], report: Path, options: list[str]) -> int:
    command = [sys.executable, "-m", "pytest", *map(str, files), "-q", f"--junitxml={report}", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=len(files) == 1, text=True)
    if done.returncode and done.stdout:
        print(done.stdout[-6000:], done.stderr[-1000:])
    return done.returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result_file", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    given, rest = parser.parse_known_args()
    sys.exit(main(given.result_file, given.jobs, rest))
