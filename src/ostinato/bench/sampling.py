"""Time of choosing a token: greedy, random, and for requests that ask for more; beside a sort.

All are returned to the host, as at the end of a step. The places of a draw move on from replay to replay: a
token that the filters leave is found sooner than one that they cut off.

python -m ostinato.bench.sampling benchmarks/results/sampling-h200.json

Logits are random: `peaked` has thirty leaders a row above a broad rest, `spread` a deviation of 4, `flat` of
0.64, which is what a Qwen3-0.6B with random weights gives.
"""

import functools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.sampling import asking_rows, filters
from ostinato.kernels.sampling.asked import Asked
from ostinato.kernels.sampling.token_lines import LogprobLines, TokenLines

from ..tools.layer_step import PlainStep, graph_us
from ..tools.machine import machine
from ..tools.results import write_json

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
MORE: dict[str, dict[str, Any]] = {
    "penalties": {"frequency": 0.5},
    "bans": {"banned_before": 1 << 30},
    "5 logprobs": {"num_logprobs": 5},
    "20 logprobs": {"num_logprobs": 20},
}
"""Beside greedy sampling, of all rows."""
SORTED_AT_ONCE = 16
"""Rows: sorting takes memory for several copies of them."""


class AskingStep:
    """Sampling of requests that all ask for the same, from one graph."""

    def __init__(self, batch_size: int, *, has_filters: bool, **fields: float) -> None:
        rows = torch.arange(batch_size + 1, dtype=torch.int32, device="cuda")
        none, off = rows * 0, rows * 0.0
        self.asked = Asked(
            temperature=off,
            seeds=rows.long(),
            lengths=rows.clone(),
            top_k=none,
            top_p=off + 1,
            min_p=off,
            repetition=off + 1,
            presence=off,
            frequency=off,
            num_biases=none,
            bias_ids=torch.zeros(batch_size + 1, 512, dtype=torch.int32, device="cuda"),
            bias_values=torch.zeros(batch_size + 1, 512, device="cuda"),
            banned=torch.full((batch_size + 1, 16), 7, dtype=torch.int32, device="cuda"),
            banned_before=none,
            num_logprobs=none - 1,
            generated=torch.zeros(batch_size + 1, VOCAB, dtype=torch.int32, device="cuda"),
            in_prompt=torch.zeros(batch_size + 1, VOCAB, dtype=torch.bool, device="cuda"),
            masks=torch.full((batch_size + 1, VOCAB // 32), -1, dtype=torch.int32, device="cuda"),
        )
        given = {name: getattr(self.asked, name) * 0 + value for name, value in fields.items()}
        self.asked = self.asked._replace(**given)
        self._rows, self._places, self._has_filters = rows[1:], rows[:-1], has_filters
        self._lines = TokenLines.of(rows.long(), rows[:1].long(), batch_size, 4)
        self._lines.counts[0] = 1
        self._logprobs = LogprobLines.of(self._lines, 20)

    def __call__(self, logits: Tensor) -> None:
        """Sample, and amend the line."""
        self.asked.lengths.add_(1)
        asking_rows.sample_asking(
            logits,
            self._rows,
            self._places,
            self.asked,
            self._lines,
            self._logprobs,
            has_filters=self._has_filters,
        )


def by_sorting(logits: Tensor, top_k: int, top_p: float, min_p: float, draw: PlainStep) -> None:
    """The same draws with the reference's filters at a temperature of 1, some rows at a time."""
    for begin in range(0, logits.size(0), SORTED_AT_ONCE):
        here = slice(begin, begin + SORTED_AT_ONCE)
        ones = torch.ones_like(logits[here, 0])
        cuts = filters.reference(logits[here], ones, (ones * top_k).int(), ones * top_p, ones * min_p)
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
    greedy, random = PlainStep(batch_size, 0.0), PlainStep(batch_size, 1.0)
    more = {name: AskingStep(batch_size, has_filters=False, **fields) for name, fields in MORE.items()}
    results = {
        "any": {
            "greedy": graph_us(lambda: greedy(normal)),
            "random": graph_us(lambda: random(normal)),
            **{name: graph_us(functools.partial(step, normal)) for name, step in more.items()},
            "top-k 50 by sorting": graph_us(
                lambda: by_sorting(normal, *ASKED["top-k 50"], random), replays=1, rounds=3
            ),
        }
    }
    for kind, logits in kinds.items():
        results[kind] = {}
        for name, (top_k, top_p, min_p) in ASKED.items():
            filters_of_all = {"temperature": 1.0, "top_k": top_k, "top_p": top_p, "min_p": min_p}
            step = AskingStep(batch_size, has_filters=True, **filters_of_all)
            results[kind][name] = graph_us(functools.partial(step, logits), replays=20, rounds=9)
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
    write_json(described, result_file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
