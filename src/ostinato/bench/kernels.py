"""Time, bytes and share of the memory's limit of each part of a decode step, as the model runs it.

python -m ostinato.bench.kernels benchmarks/results/kernels-h200.json [MODEL ...]

Every part runs in a captured graph of its own, once for each layer, so that weights come from memory and gaps
between kernels count. MODELs are folders of benchmarks/models; default: the three of docs/kernels.md.
"""

import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ostinato.models.transformer import Transformer
from ostinato.models.weights import load_model

from ..tools.layer_step import LayerStep, PlainStep, graph_us
from ..tools.machine import machine
from ..tools.results import write_json
from .repository import MODELS

NAMES = ("llama-3.1-8b", "llama-3.2-1b", "qwen3-0.6b")
BATCHES = (1, 8, 32, 128, 256)
CONTEXT = 192
READ_BYTES_PER_US = 4.5e6
"""The best rate at which an H200 was seen to read."""
MOST_LAYERS = 16


def _for_each(run: Callable[[Any], Any], layers: Iterable[Any]) -> None:
    for layer in layers:
        run(layer)


def measured(model: Transformer, batch_size: int) -> dict[str, dict[str, float]]:
    """Microseconds, megabytes and share of the limit, of each part and of a whole layer."""
    step = LayerStep(model, batch_size, num_layers=MOST_LAYERS, context=CONTEXT)
    layers = range(len(step.layers))
    results = {}

    def note(name: str, us: float, num_bytes: int) -> None:
        share = num_bytes / READ_BYTES_PER_US / us
        results[name] = {"us": round(us, 2), "mb": round(num_bytes / 1e6, 2), "share": round(share, 3)}
        print(f"{batch_size:4d} {name:12s} {us:8.2f} us {num_bytes / 1e6:9.2f} MB {share:6.1%}", flush=True)

    parts = step.parts()
    for name, (run, num_bytes) in parts.items():
        over_layers = functools.partial(_for_each, run, layers)
        note(name, graph_us(over_layers) / len(layers), num_bytes)
    layer_bytes = sum(num_bytes for name, (_, num_bytes) in parts.items() if name != "add, norm")
    note("whole layer", graph_us(step.run_layers) / len(layers), layer_bytes)
    weight = (model.lm_head or model.embed_tokens).weight
    head_bytes = weight.nbytes + step.scores.nbytes
    note("head", graph_us(step.run_head), head_bytes)
    greedy = PlainStep(batch_size, 0.0)
    note(
        "greedy", graph_us(lambda: _for_each(lambda _: greedy(step.scores), range(4))) / 4, step.scores.nbytes
    )
    return results


@torch.no_grad()
def main(result_file: Path, names: list[str]) -> None:
    """Measure the models and write the results."""
    results: dict[str, dict[int, dict[str, dict[str, float]]]] = {}
    for name in names or NAMES:
        folder = MODELS / name
        print(name, flush=True)
        model = load_model(folder, device="cuda", dtype=torch.bfloat16, load_format="dummy")
        results[name] = {batch_size: measured(model, batch_size) for batch_size in BATCHES}
        del model
        torch.cuda.empty_cache()
    described = {"benchmark": "kernels", "machine": machine(), "context": CONTEXT, "models": results}
    result_file.parent.mkdir(parents=True, exist_ok=True)
    write_json(described, result_file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
