"""A model that no table knows: layers by the rules, beside layers by what a tuning in place finds.

python -m ostinato.bench.untuned benchmarks/results/untuned-h200.json [MODEL ...]

All tables are switched off. Each number of tokens is tuned as `ostinato tune` does it, with what the rules
say among the candidates; then both are timed again, in turn, so that a lucky measurement counts for neither.
MODELs are folders of benchmarks/models; default: Qwen3-4B and Llama-3.2-3B, about four minutes on an H200.
Numbers of tokens that are not begun when the time is over are left out, and named.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ostinato.kernels.gpu import gpu_of
from ostinato.kernels.linear.choice import choose, using
from ostinato.models.weights import load_model

from ..tools.layer_step import LayerStep
from ..tools.machine import machine
from ..tools.results import write_json
from ..tools.tune.descent import CONTEXT, LAYERS, Tiles, Tuner
from ..tools.tune.tuning import kernel_text, matrix_text
from .repository import MODELS

NAMES = ("qwen3-4b", "llama-3.2-3b")
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256)
TURNS = 5
MOST_SECONDS = 280.0
HEADING = "tokens    cuBLAS     rules     tuned   ratio  head, rules     tuned   ratio"
MOST_RATIO = 1.15
"""What an untuned shape may take, compared with a tuned one."""


def measured(tuner: Tuner, num_tokens: int) -> dict[str, Any]:
    """Microseconds of a layer and of the head, by the rules and tuned."""
    dtype, device = tuner.model.embed_tokens.weight.dtype, tuner.device
    found = tuner.find(num_tokens, {})
    rules: Tiles = {shape: choose(shape, num_tokens, dtype, device) for shape in found.tiles}
    step = LayerStep(tuner.model, num_tokens, num_layers=LAYERS, context=CONTEXT)
    row: dict[str, Any] = {"tokens": num_tokens, "library_us": round(found.library_us, 2)}
    for part, run, per in (("layer", step.run_layers, LAYERS), ("head", step.run_head, 1)):
        turns = [[tuner.us(run, tiles, num_tokens) for tiles in (rules, found.tiles)] for _ in range(TURNS)]
        by_rules, tuned = (statistics.median(times) / per for times in zip(*turns, strict=True))
        row[part] = {
            "rules_us": round(by_rules, 2),
            "tuned_us": round(tuned, 2),
            "ratio": round(by_rules / tuned, 3),
        }
    row["kernels"] = {
        matrix_text(shape): {"rules": kernel_text(rules[shape]), "tuned": kernel_text(tile)}
        for shape, tile in found.tiles.items()
    }
    return row


def told(row: dict[str, Any]) -> str:
    """A line of the printed table."""
    layer, head = row["layer"], row["head"]
    return (
        f"{row['tokens']:6d} {row['library_us']:9.2f} {layer['rules_us']:9.2f} {layer['tuned_us']:9.2f} "
        f"{layer['ratio']:7.3f} {head['rules_us']:11.2f} {head['tuned_us']:9.2f} {head['ratio']:7.3f}"
    )


@torch.no_grad()
def main(result_file: Path, names: list[str]) -> None:
    """Measure, print and write."""
    began, device = time.monotonic(), torch.device("cuda", torch.cuda.current_device())
    results: dict[str, list[dict[str, Any]]] = {}
    left_out = []
    for name in names or NAMES:
        print(f"{name}\n{HEADING}", flush=True)
        with using(None, package=False):
            model = load_model(MODELS / name, device=device, dtype=torch.bfloat16, load_format="dummy")
            tuner = Tuner(model, gpu_of(device))
            rows = results.setdefault(name, [])
            for num_tokens in TOKENS:
                if time.monotonic() - began > MOST_SECONDS:
                    left_out.append(f"{name} at {num_tokens} tokens")
                    continue
                rows.append(measured(tuner, num_tokens))
                print(told(rows[-1]), flush=True)
        del model, tuner
        torch.cuda.empty_cache()
    ratios = [row["layer"]["ratio"] for rows in results.values() for row in rows]
    seconds = round(time.monotonic() - began)
    print(f"worst {max(ratios):.3f}, wanted {MOST_RATIO}; {seconds} s; left out: {left_out or 'nothing'}")
    described = {"benchmark": "untuned", "machine": machine(), "gpu": str(gpu_of(device)), "context": CONTEXT}
    figures = {"worst_ratio": max(ratios), "seconds": seconds, "left_out": left_out, "models": results}
    result_file.parent.mkdir(parents=True, exist_ok=True)
    write_json(described | figures, result_file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
