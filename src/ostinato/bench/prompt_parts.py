"""Where the time to the first token goes: what each kind of kernel takes of a prompt step.

python -m ostinato.bench.prompt_parts benchmarks/results/prompt-parts-h200.json [--models qwen3-0.6b]

An engine with random weights reads prompts in, once for the clock and once under the profiler, which sees the
kernels inside graphs too. Beside it the products of a layer, each alone in a captured graph of several
matrices: what cuBLAS's choice of an algorithm reaches, and what cuBLASLt's would. Rows are written as they
come.
"""

import argparse
import json
import random
import re
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ostinato import LLM, SamplingParams
from ostinato.models.config import ModelConfig

from ..tools.layer_step import graph_us
from ..tools.machine import machine
from ..tools.results import write_json
from .repository import MODELS

BATCHES = ((1, 512), (32, 512), (1, 4096), (4, 4096), (1, 16_384), (8, 8192), (32, 8192))
MOST_TOKENS = {"llama-3.1-8b": 65_536}
"""Of a batch, for models with which more would only take long."""
KINDS = {
    "attention": r"\battend\b|_attend",
    "heads": "prepare_heads",
    "norm": "rms_norm",
    "gate": "silu_mul",
    "products": "nvjet|gemm|cutlass|cublas|splitK|sm90_",
}
"""Kinds of kernels, by their names; what is none of these is listed by its own."""
MATRIX_BYTES = 256 << 20
"""Of the matrices that a graph of products goes through, so that none is in L2 already."""


def device_events(call: Callable[[], object]) -> list[dict[str, Any]]:
    """Kernels and copies while `call` runs."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace = json.loads(file.read_text())["traceEvents"]
    found = [event for event in trace if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return sorted(found, key=lambda event: float(event["ts"]))


def kind_of(name: str) -> str:
    """Of a kernel; its own name, shortened, where it is of no kind."""
    return next((kind for kind, names in KINDS.items() if re.search(names, name)), name[:60])


def parts_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds by kind, and those in which nothing ran."""
    taken, number = defaultdict[str, float](float), Counter[str]()
    busy_until, idle = float(events[0]["ts"]), 0.0
    for event in events:
        kind, start, length = kind_of(event["name"]), float(event["ts"]), float(event["dur"])
        taken[kind] += length / 1e3
        number[kind] += 1
        idle += max(0.0, start - busy_until) / 1e3
        busy_until = max(busy_until, start + length)
    return {
        "window_ms": round((busy_until - float(events[0]["ts"])) / 1e3, 2),
        "idle_ms": round(idle, 2),
        "kinds": {
            kind: {"ms": round(taken[kind], 3), "launches": number[kind]}
            for kind in sorted(taken, key=lambda kind: -taken[kind])[:12]
        },
    }


def engine_rows(model: str, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each batch of prompts."""
    draw, once = random.Random(0), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    started = {"max_model_len": 17_000, "enable_prefix_caching": False} | options
    with LLM(str(MODELS / model), load_format="dummy", **started) as llm:
        vocab = llm.engine.core.loaded.model.config.vocab_size
        for number, length in BATCHES:
            if number * length > MOST_TOKENS.get(model, number * length):
                continue
            prompts = [{"prompt_token_ids": draw.choices(range(vocab), k=length)} for _ in range(number)]

            def read_in(prompts: list[dict[str, list[int]]] = prompts) -> None:
                llm.generate(prompts, once, use_tqdm=False)

            read_in()
            times = []
            for _ in range(3):
                began = time.perf_counter()
                read_in()
                times.append((time.perf_counter() - began) * 1e3)
            row = {
                "model": model,
                "prompts": f"{number} x {length:,}",
                "ms": round(statistics.median(times), 2),
            }
            yield row | parts_of(device_events(read_in))


@contextmanager
def library(name: str) -> Iterator[None]:
    """Of torch's two, for products."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def product_rows(model: str) -> Iterator[dict[str, Any]]:
    """TFLOP/s of each matrix of a layer."""
    config = ModelConfig.load(MODELS / model)
    hidden, inner, q_width = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    shapes = {
        "qkv": (q_width + 2 * config.num_kv_heads * config.head_dim, hidden),
        "o": (hidden, q_width),
        "gate, up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    for name, (rows, columns) in shapes.items():
        number = max(2, min(16, MATRIX_BYTES // (rows * columns * 2)))
        matrices = torch.randn(number, rows, columns, device="cuda", dtype=torch.bfloat16)
        for tokens in (4096, 16_384):
            x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
            out = torch.zeros(tokens, rows, device="cuda", dtype=torch.bfloat16)
            yield {
                "model": model,
                "matrix": f"{name} {rows} x {columns}",
                "tokens": tokens,
                "tflops": {
                    way: round(2e-6 * tokens * rows * columns * number / us, 1)
                    for way, us in product_times(matrices, x, out).items()
                },
            }


def product_times(matrices: Tensor, x: Tensor, out: Tensor) -> dict[str, float]:
    """Microseconds of all products by each way; `added` adds them to what is there."""

    def plain() -> None:
        for matrix in matrices:
            functional.linear(x, matrix)

    def added() -> None:
        for matrix in matrices:
            torch.addmm(out, x, matrix.t(), out=out)

    times = {}
    for name in ("cublas", "cublaslt"):
        with library(name):
            times[name] = graph_us(plain, replays=2, rounds=3)
            times[f"{name}, added"] = graph_us(added, replays=2, rounds=3)
    return times


def main(file: Path | None, models: list[str], options: dict[str, Any], *, products: bool) -> None:
    """Measure, print, write."""
    result: dict[str, Any] = {"benchmark": "parts of prompt steps", "machine": machine()}
    for model in models:
        kinds = {"products": product_rows(model)} if products else {}
        for kind, rows in {**kinds, "rows": engine_rows(model, options)}.items():
            for row in rows:
                result.setdefault(kind, []).append(row)
                print(json.dumps(row), flush=True)
                if file is not None:
                    write_json(result, file)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "llama-3.1-8b"])
    parser.add_argument("--options", type=json.loads, default={}, help="of the engine")
    parser.add_argument("--no-products", action="store_true", help="engines only")
    given = parser.parse_args()
    main(given.file, given.models, given.options, products=not given.no_products)
