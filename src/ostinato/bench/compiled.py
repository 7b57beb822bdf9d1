"""Layers through torch.compile beside layers as they are, in captured graphs.

python -m ostinato.bench.compiled benchmarks/results/compiled-h200.json

Four layers of Qwen3-0.6B: inductor takes minutes for all 28. "ours": the kernels of this package, which are
single ops to torch.compile. "library": products by cuBLAS, norms of their own.
"""

import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from ostinato.kernels.linear.choice import using
from ostinato.kernels.linear.tables import Choice, KernelTable
from ostinato.kernels.linear.tiles import Library
from ostinato.models.transformer import Transformer
from ostinato.models.weights import load_model

from ..tools.layer_step import LayerStep, graph_us
from ..tools.machine import machine
from ..tools.results import write_json
from .repository import MODELS

MODEL = MODELS / "qwen3-0.6b"
BATCHES = (1, 8)
NUM_LAYERS = 4
CONTEXT = 192
MOST_TOKENS = 4096


def measured(model: Transformer, batch_size: int) -> dict[str, float]:
    """Microseconds of a layer, plain and compiled, and the seconds that compiling took."""
    step = LayerStep(model, batch_size, num_layers=NUM_LAYERS, context=CONTEXT)
    wanted = step.run_layers().float()
    compiled = torch.compile(step.run_layers, dynamic=False)
    began = time.perf_counter()
    found = compiled().float()
    seconds = time.perf_counter() - began
    assert (found - wanted).norm() < 2e-2 * wanted.norm()
    plain_us, compiled_us = (graph_us(run) / NUM_LAYERS for run in (step.run_layers, compiled))
    return {"plain_us": plain_us, "compiled_us": compiled_us, "compile_s": seconds}


def main(file: Path) -> None:
    """Measure, print and write."""
    model = load_model(MODEL, device=torch.device("cuda"), dtype=torch.bfloat16, load_format="dummy")
    choices = {shape: (Choice(1, MOST_TOKENS, Library()),) for shape in model.matrix_shapes}
    rows = []
    with torch.no_grad():
        for kind in ("ours", "library"):
            with nullcontext() if kind == "ours" else using(KernelTable("any", choices)):
                for batch_size in BATCHES:
                    rows.append({"kernels": kind, "batch": batch_size, **measured(model, batch_size)})
                    print(rows[-1], flush=True)
    described = {"benchmark": "compiled layers", "machine": machine(), "num_layers": NUM_LAYERS, "rows": rows}
    write_json(described, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
