"""Time of choosing a token: greedy, random, and behind top-k, top-p and min-p, beside a sort.

Greedy and random tokens are returned to the host too, as at the end of a decode step.

python benchmarks/sampling.py benchmarks/results/sampling-h200.json

Logits are random: `peaked` has thirty leaders a row above a broad rest, `spread` a deviation of 4, `flat` of
0.64, which is what a Qwen3-0.6B with random weights gives.
"""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from ostinato.kernels import filters, sampling
from ostinato.kernels.sampling import GREEDY_BELOW, SamplingSettings
from ostinato.tools.layer_step import PlainStep, graph_us
from ostinato.tools.machine import machine

BATCHES = (1, 32, 256)
VOCAB = 151_936
ASKED = {
    "off": (0, 1.0, 0.0),
    "top-k 50": (50, 1.0, 0.0),
    "top-p 0.9": (0, 0.9, 0.0),
    "top-k 20, top-p 0.95": (20, 0.95, 0.0),
    "top-k 5000": (5000, 1.0, 0.0),
    "min-p 0.05": (0, 1.0, 0.05),
}
"""top-k, top-p and min-p."""
SORTED_AT_ONCE = 16
"""Rows: sorting takes memory for several copies of them."""


def settings_of(batch_size: int, top_k: int, top_p: float, min_p: float) -> SamplingSettings:
    """The same for all rows, at a temperature of 1."""
    ones = torch.ones(batch_size, device="cuda")
    seeds = torch.arange(batch_size, device="cuda")
    return SamplingSettings(ones, (ones * top_k).int(), ones * top_p, ones * min_p, seeds)


def by_sorting(logits: Tensor, chosen: SamplingSettings, draw: PlainStep) -> None:
    """The same draws with the reference's filters, some rows at a time."""
    for begin in range(0, logits.size(0), SORTED_AT_ONCE):
        here = slice(begin, begin + SORTED_AT_ONCE)
        some = SamplingSettings(*(value[here] for value in vars(chosen).values()))
        asked = (some.temperature, some.top_k, some.top_p, some.min_p)
        cuts = filters.reference(logits[here], *asked, GREEDY_BELOW)
        left = logits[here].masked_fill(~filters.is_kept(logits[here], *cuts), float("-inf"))
        draw(left)


def measured(batch_size: int) -> dict[str, dict[str, float]]:
    """Microseconds by kind of logits and what is asked of them."""
    generator = torch.Generator("cuda").manual_seed(0)
    normal = torch.randn(batch_size, VOCAB, device="cuda", generator=generator)
    leaders = torch.randint(VOCAB, (batch_size, 30), device="cuda", generator=generator)
    height = 12 * torch.rand(batch_size, 30, device="cuda", generator=generator)
    kinds = {
        "peaked": (2 * normal).scatter_add(1, leaders, height),
        "spread": 4 * normal,
        "flat": 0.64 * normal,
    }
    rows = torch.arange(batch_size, dtype=torch.int32, device="cuda")
    greedy, random = PlainStep(batch_size, 0.0), PlainStep(batch_size, 1.0)
    top_k = settings_of(batch_size, *ASKED["top-k 50"])
    results = {
        "any": {
            "greedy": graph_us(lambda: greedy(normal)),
            "random": graph_us(lambda: random(normal)),
            "top-k 50 by sorting": graph_us(lambda: by_sorting(normal, top_k, random), replays=1, rounds=3),
        }
    }
    for kind, logits in kinds.items():
        results[kind] = {}
        for name, asked in ASKED.items():
            chosen = settings_of(batch_size, *asked)
            results[kind][name] = graph_us(lambda x=logits, s=chosen: sampling.sample(x, rows, s, rows))
    for kind, times in results.items():
        print(
            f"{batch_size:4d} {kind:7s}",
            ", ".join(f"{name} {us:.1f}" for name, us in times.items()),
            flush=True,
        )
    return results


@torch.no_grad()
def main(result_file: Path) -> None:
    """Measure and write the results."""
    results = {batch_size: measured(batch_size) for batch_size in BATCHES}
    described = {"benchmark": "sampling", "machine": machine(), "vocabulary": VOCAB, "us": results}
    result_file.parent.mkdir(parents=True, exist_ok=True)
    result_file.write_text(json.dumps(described, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
