"""Everything behind the committed CPU results, in one go: some ten minutes on a small machine.

python -m ostinato.bench.run_cpu benchmarks/results [--budget SECONDS] [NAME ...]

Each benchmark is a command of its own, over the default model, and writes NAME-cpu.json; how it works: see
run_h200.py. Nothing else should run on the machine meanwhile.
"""

import sys

from .run_h200 import Benchmark, command_line

# Times are those of two Neoverse-N1 cores.
BENCHMARKS = (
    Benchmark("decode-smollm2", 100, "decode --peer transformers", needs="transformers"),
    Benchmark("prefill-smollm2", 120, "prefill --peer transformers", needs="transformers"),
    Benchmark("throughput-smollm2", 60, "throughput"),
    Benchmark("host-smollm2", 60, "host"),
    Benchmark("on-off-smollm2", 90, "graphs-on-off"),
    Benchmark("startup-smollm2", 60, "startup --rungs 2,4"),
    Benchmark(
        "http-smollm2",
        90,
        "http --streams 4 --num-requests 12 --input-len 32 --output-len 24 --max-model-len 128",
        needs="uvicorn",
    ),
)

if __name__ == "__main__":
    sys.exit(command_line(BENCHMARKS, "cpu"))
