"""Products of thousands of tokens: cuBLAS beside `cuda/prompt_product.cu`, as TFLOP/s.

python -m ostinato.bench.prompt_products benchmarks/results/prompt-products-h200.json

First what it computes, against float32 and against the path without it, bit by bit. Then speed under
sustained load: bf16, random normal data of a model's scale, graphs of several matrices replayed for 100 ms
and more each, in turns, each way first once, the median; with clock and power that nvidia-smi saw meanwhile,
if it is there. The GPU is busy all the time: after a pause it may take more power for a while.
`gated` and `gate pass` are products and gates, `added` and `cublas added` products that are added to rows.
"""

import argparse
import re
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ostinato.kernels.linear.cuda_prompt import launch_prompt, prompt_kernel
from ostinato.kernels.norms.rows import silu_mul

from ..tools.machine import machine
from ..tools.results import write_json

SHAPES = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate, up": (28672, 4096),
    "8B down": (4096, 14336),
    "0.6B qkv": (4096, 1024),
    "0.6B o": (1024, 2048),
    "0.6B gate, up": (6144, 1024),
    "0.6B down": (1024, 3072),
}
TOKENS = (4096, 16_384, 2048)
MATRIX_BYTES = 256 << 20
"""Of the matrices that a graph goes through, so that none is in L2 already."""
SECONDS = 0.1
Way = Callable[[int], object]
"""The product with the n-th matrix."""


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).mul_(scale)


def compile_all() -> float:
    """Seconds it took."""
    began = time.perf_counter()
    for gated, added in ((False, False), (True, False), (False, True)):
        prompt_kernel(gated=gated, added=added, bias=False).compile((9, 0))
    return time.perf_counter() - began


def differences(ours: Tensor, exact: Tensor, other: Tensor) -> dict[str, float]:
    """The largest error, the same of the other way, and how many results have other bits than that has."""
    return {
        "error": (ours.float() - exact).abs().max().item(),
        "error of the other": (other.float() - exact).abs().max().item(),
        "other bits": (ours != other).float().mean().item(),
    }


def checks() -> Iterator[tuple[str, dict[str, float]]]:
    """All forms on sizes that are no multiples of tiles."""
    for tokens, rows, columns in ((3000, 6144, 4096), (4096, 4096, 14336), (1111, 1040, 1032)):
        x, weight = normal(tokens, columns), normal(rows, columns, scale=columns**-0.5)
        exact = x.float() @ weight.float().t()
        product = functional.linear(x, weight)
        gate, up = exact.bfloat16().float().chunk(2, dim=-1)
        gated = functional.silu(gate) * up
        by_pass = silu_mul(product.clone())
        rows_before = normal(tokens, rows)
        shape = f"{tokens} x {rows} x {columns}"
        out = torch.full_like(product, torch.nan)
        launch_prompt(x, weight, None, out)
        yield f"{shape}, plain", differences(out, exact, product)
        half = out.new_full((tokens, rows // 2), torch.nan)
        launch_prompt(x, weight, None, half)
        yield f"{shape}, gated", differences(half, gated, by_pass)
        total = rows_before.clone()
        launch_prompt(x, weight, None, total, added=True)
        yield f"{shape}, added", differences(total, rows_before.float() + exact, rows_before + product)


class Watch:
    """The clock and the power of the GPU, sampled beside."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float]] = []
        program = shutil.which("nvidia-smi")
        if program is None:
            return
        query = "--query-gpu=clocks.sm,power.draw.instant"
        command = [program, query, "--format=csv,noheader,nounits", "-lms", "20"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := re.fullmatch(r"([\d.]+), ([\d.]+)\s*", line):
                self.samples.append((time.perf_counter(), float(found[1]), float(found[2])))

    def between(self, began: float, ended: float) -> tuple[int, int] | None:
        """MHz and watts, in the second half of a time."""
        middle = (began + ended) / 2
        seen = [sample for sample in self.samples if middle <= sample[0] <= ended]
        if not seen:
            return None
        return round(statistics.mean(s[1] for s in seen)), round(statistics.mean(s[2] for s in seen))

    def close(self) -> None:
        if hasattr(self, "_process"):
            self._process.terminate()


@contextmanager
def watching() -> Iterator[Watch]:
    watch = Watch()
    try:
        yield watch
    finally:
        watch.close()


def ways_of(name: str, x: Tensor, matrices: Tensor) -> dict[str, Way]:
    """How to run the products of a matrix."""
    tokens, rows = x.size(0), matrices.size(1)
    out = torch.zeros(tokens, rows, device="cuda", dtype=torch.bfloat16)

    def ours(to: Tensor, added: bool = False) -> Way:
        return lambda n: launch_prompt(x, matrices[n], None, to, added=added)

    ways: dict[str, Way] = {"cublas": lambda n: torch.mm(x, matrices[n].t(), out=out), "ours": ours(out)}
    if "gate" in name:
        ways["gate pass"] = lambda n: silu_mul(torch.mm(x, matrices[n].t(), out=out))
        ways["gated"] = ours(out.new_zeros(tokens, rows // 2))
    if name.endswith((" o", "down")):
        ways["cublas added"] = lambda n: torch.addmm(out, x, matrices[n].t(), out=out)
        ways["added"] = ours(out, added=True)
    return ways


def captured(way: Way, number: int) -> torch.cuda.CUDAGraph:
    way(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for n in range(number):
            way(n)
    return graph


def sustained_us(graph: torch.cuda.CUDAGraph, expected_us: float) -> tuple[float, float, float]:
    """Microseconds of a replay, after some that were not counted; when it began and ended."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replays = max(2, round(SECONDS * 1e6 / expected_us))
    began = time.perf_counter()
    for _ in range(max(1, replays // 4)):
        graph.replay()
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000 / replays, began, time.perf_counter()


def row_of(name: str, tokens: int, watch: Watch) -> dict[str, Any]:
    """TFLOP/s, MHz and watts by way."""
    rows, columns = SHAPES[name]
    number = max(2, min(16, MATRIX_BYTES // (rows * columns * 2)))
    matrices = normal(number, rows, columns, scale=columns**-0.5)
    graphs = {
        way: captured(call, number) for way, call in ways_of(name, normal(tokens, columns), matrices).items()
    }
    flops = 2.0 * tokens * rows * columns * number
    names = list(graphs)
    found: dict[str, list[tuple[float, tuple[int, int] | None]]] = {way: [] for way in names}
    sustained_us(graphs[names[0]], 2 * flops / 700e6)
    for first in range(len(names)):
        for way in names[first:] + names[:first]:
            us, began, ended = sustained_us(graphs[way], flops / 700e6)
            found[way].append((us, watch.between(began, ended)))
    medians = {way: sorted(times, key=lambda time: time[0])[len(times) // 2] for way, times in found.items()}
    return {
        "matrix": f"{name} {rows} x {columns}",
        "tokens": tokens,
        "tflops": {way: round(flops / us / 1e6, 1) for way, (us, _) in medians.items()},
        "us": {way: round(us / number, 1) for way, (us, _) in medians.items()},
        "mhz_and_watts": {way: seen for way, (_, seen) in medians.items()},
    }


def print_checks(found: dict[str, dict[str, float]]) -> None:
    """The worst of all sizes, by form."""
    worst: dict[str, dict[str, float]] = {}
    for name, values in found.items():
        _, form = name.split(", ", 1)
        before = worst.setdefault(form, values)
        worst[form] = {what: max(value, before[what]) for what, value in values.items()}
    for form, values in worst.items():
        print(form, {what: f"{value:.2e}" for what, value in values.items()}, flush=True)


def print_table(rows: list[dict[str, Any]]) -> None:
    """A line for each product: TFLOP/s, and MHz of the first two ways."""
    for row in rows:
        figures = ", ".join(f"{way} {tflops:.0f}" for way, tflops in row["tflops"].items())
        seen = [f"{way} {row['mhz_and_watts'][way]}" for way in ("cublas", "ours")]
        print(f"{row['matrix']:28} {row['tokens']:6} {figures}; (MHz, W) {', '.join(seen)}", flush=True)


def main(file: Path) -> None:
    """Check, measure, write, print."""
    result: dict[str, Any] = {"benchmark": "prompt products", "machine": machine()}
    print(f"compiled in {compile_all():.1f} s", flush=True)
    result["checks"] = dict(checks())
    print_checks(result["checks"])
    rows: list[dict[str, Any]] = []
    with watching() as watch:
        for name in SHAPES:
            for tokens in TOKENS:
                rows.append(row_of(name, tokens, watch))
                torch.cuda.empty_cache()
                write_json(result | {"rows": rows}, file)
    print_table(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    main(parser.parse_args().file)
