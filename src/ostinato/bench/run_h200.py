"""Everything behind the committed GPU results, in one go: about ten minutes on an H200.

python -m ostinato.bench.run_h200 benchmarks/results [--budget SECONDS] [NAME ...]

Each benchmark is a command of its own and writes NAME-h200.json; NAMEs choose some of them, `--list` shows
them with the time each is expected to take. They run in the order of their importance; with a budget, one
that would not end within it is left out. What fails is named at the end, and the others run all the same. The
pictures are drawn afterwards, where matplotlib is:
ostinato bench plot benchmarks/results/{decode,prefill,throughput,host,startup,on-off}-*-h200.json
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .repository import RESULTS, ROOT

QWEN, LLAMA_1B, LLAMA_8B = (
    f"benchmarks/models/{name}" for name in ("qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b")
)


@dataclass(frozen=True)
class Benchmark:
    """One command and what it takes."""

    name: str
    seconds: int
    """Expected, engines started twice and checks included."""
    command: str
    needs: str | None = None
    """A package that may not be there."""


# A long context is prefilled once and then found in the prefix cache: TPOT is a difference of two runs, and
# seconds of prefill in both would bury it. 32 requests of 32,768 tokens are 120 GB of KV, which just fits.
BENCHMARKS = (
    Benchmark("decode-qwen3-0.6b", 20, f"decode --model {QWEN} --batch-sizes 1,8,32,128,256"),
    Benchmark("throughput-qwen3-0.6b", 20, f"throughput --model {QWEN} --repeats 2"),
    Benchmark("startup-qwen3-0.6b", 25, f"startup --model {QWEN} --rungs 6,18,36"),
    Benchmark("host-qwen3-0.6b", 25, f"host --model {QWEN} --batch-sizes 1,8,32,128,256,512"),
    Benchmark("on-off-qwen3-0.6b", 45, f"graphs-on-off --model {QWEN} --output-len 64 --repeats 2"),
    Benchmark("decode-llama-3.2-1b", 15, f"decode --model {LLAMA_1B} --batch-sizes 1,8,32"),
    Benchmark(
        "decode-llama-3.1-8b",
        25,
        f"decode --model {LLAMA_8B} --batch-sizes 1,8,32,128 --output-len 64",
    ),
    Benchmark(
        "http",
        45,
        f"http --model {QWEN} --streams 64 --num-requests 512 --input-len 128 --output-len 256 "
        "--max-model-len 512 --repeats 2",
        needs="uvicorn",
    ),
    Benchmark("prefill-qwen3-0.6b", 50, f"prefill --model {QWEN} --peer transformers", needs="transformers"),
    Benchmark(
        "decode-context-qwen3-0.6b",
        50,
        f"decode --model {QWEN} --batch-sizes 1,8,32 --input-len 128,1024,8192 --output-len 64 --repeats 2 "
        "--enable-prefix-caching",
    ),
    Benchmark("on-off-llama-3.1-8b", 55, f"graphs-on-off --model {LLAMA_8B} --output-len 48 --repeats 2"),
    Benchmark(
        "decode-context-32k-qwen3-0.6b",
        75,
        f"decode --model {QWEN} --batch-sizes 1,32 --input-len 32768 --output-len 64 --repeats 2 "
        "--enable-prefix-caching",
    ),
)


def main(benchmarks: Sequence[Benchmark], ending: str, folder: Path, names: list[str], budget: float) -> int:
    """Run the commands; the number of those that failed."""
    unknown = set(names) - {benchmark.name for benchmark in benchmarks}
    if unknown:
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; --list shows those there are")
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [benchmark for benchmark in benchmarks if not names or benchmark.name in names]
    began = time.perf_counter()
    failed, left_out = [], []
    with tempfile.TemporaryDirectory() as byte_code:
        environment = _environment(byte_code)
        for benchmark in chosen:
            passed = time.perf_counter() - began
            missing = benchmark.needs is not None and importlib.util.find_spec(benchmark.needs) is None
            if passed + benchmark.seconds > budget or missing:
                left_out.append(f"{benchmark.name} ({f'no {benchmark.needs}' if missing else 'no time'})")
                continue
            print(f"== {benchmark.name}: about {benchmark.seconds} s", flush=True)
            if not _run(benchmark, folder.resolve() / f"{benchmark.name}-{ending}.json", environment):
                failed.append(benchmark.name)
            print(f"== {benchmark.name}: {time.perf_counter() - began - passed:.1f} s", flush=True)
    print(f"failed: {', '.join(failed) or 'none'}; left out: {', '.join(left_out) or 'none'}")
    return len(failed)


def _run(benchmark: Benchmark, file: Path, environment: dict[str, str]) -> bool:
    command = [sys.executable, "-m", "ostinato", "bench", *benchmark.command.split(), "--json", str(file)]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode == 0


def _environment(byte_code: str) -> dict[str, str]:
    """Ours, with a place for byte code where the environment has none: each command imports torch twice."""
    environment = {**os.environ}
    if environment.pop("PYTHONDONTWRITEBYTECODE", None):
        environment["PYTHONPYCACHEPREFIX"] = byte_code
    path = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *([path] if path else [])])}


def command_line(benchmarks: Sequence[Benchmark], ending: str) -> int:
    """What to run, from the arguments of the process; the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    if not given.list:
        return main(benchmarks, ending, given.folder, given.names, given.budget)
    for each in benchmarks:
        print(f"{each.seconds:4d} s  {each.name}: ostinato bench {each.command}")
    print(f"{sum(each.seconds for each in benchmarks):4d} s  in all")
    return 0


if __name__ == "__main__":
    sys.exit(command_line(BENCHMARKS, "h200"))
