"""Everything behind the committed GPU results, in one go: some minutes on an H200.

python benchmarks/run_h200.py benchmarks/results [NAME ...]

Each benchmark is a command of its own and writes NAME-h200.json; NAMEs choose some of them. What fails is
named at the end, and the others run all the same. The pictures are drawn afterwards, where matplotlib is:
ostinato bench plot benchmarks/results/{decode,host,startup,on-off,throughput}*-h200.json --out docs/plots
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
QWEN, LLAMA_1B, LLAMA_8B = (
    f"benchmarks/models/{name}" for name in ("qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b")
)

COMMANDS = {
    "decode-qwen3-0.6b": f"decode --model {QWEN} --batch-sizes 1,8,32,128,256",
    "decode-llama-3.2-1b": f"decode --model {LLAMA_1B} --batch-sizes 1,8,32",
    "decode-llama-3.1-8b": f"decode --model {LLAMA_8B} --batch-sizes 1,8,32,128 --output-len 64",
    "throughput-qwen3-0.6b": f"throughput --model {QWEN} --repeats 3",
    "host-qwen3-0.6b": f"host --model {QWEN} --output-len 128 --repeats 3",
    "startup-qwen3-0.6b": f"startup --model {QWEN} --rungs 6,18,36",
    "on-off-qwen3-0.6b": f"graphs-on-off --model {QWEN} --output-len 64",
    "on-off-llama-3.1-8b": f"graphs-on-off --model {LLAMA_8B} --output-len 48 --repeats 2",
    "decode-context-qwen3-0.6b": (
        f"decode --model {QWEN} --batch-sizes 1,8,32 --input-len 128,1024,4096 --output-len 64 --repeats 2"
    ),
}


def main(folder: Path, names: list[str]) -> int:
    """Run the commands; the number of those that failed."""
    unknown = set(names) - COMMANDS.keys()
    if unknown:
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(COMMANDS)}")
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    failed = []
    for name in names or COMMANDS:
        print(f"== {name}", flush=True)
        file = folder.resolve() / f"{name}-h200.json"
        command = [sys.executable, "-m", "ostinato", "bench", *COMMANDS[name].split(), "--json", str(file)]
        started = time.perf_counter()
        if subprocess.run(command, cwd=ROOT, env=environment).returncode != 0:
            failed.append(name)
        print(f"== {name}: {time.perf_counter() - started:.1f} s", flush=True)
    print(f"failed: {', '.join(failed) or 'none'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
