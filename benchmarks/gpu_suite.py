"""Run the contract suite on this machine's GPU and write what passed, with machine and versions.

python benchmarks/gpu_suite.py benchmarks/results/gpu-suite-h200.json
"""

import collections
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from ostinato.tools.machine import machine

ROOT = Path(__file__).parents[1]


def main(result_file: Path) -> int:
    """Run, summarise, write; the exit code is pytest's."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", f"--junitxml={xml}", *sys.argv[2:]]
        code = subprocess.run(command, cwd=ROOT).returncode
        suite = ElementTree.parse(xml).getroot()[0]
    outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    failed = []
    for case in suite.iter("testcase"):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcome = kinds.pop() if kinds else "passed"
        outcomes[case.get("classname", "").split(".")[-1]][outcome] += 1
        if outcome in ("failure", "error"):
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    total = sum(outcomes.values(), collections.Counter[str]())
    result = {
        "command": "pytest tests/gpu",
        "machine": machine(),
        "seconds": round(float(suite.get("time", 0)), 1),
        "total": dict(total),
        "failed": failed,
        "modules": {name: dict(counts) for name, counts in sorted(outcomes.items())},
    }
    result_file.parent.mkdir(parents=True, exist_ok=True)
    result_file.write_text(json.dumps(result, indent=2) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
