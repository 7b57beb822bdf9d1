"""A training step of a GPT-2 small: eager, through torch.compile, and from graphs.

python benchmarks/training.py benchmarks/results/training-h200.json [--batches 1 4 32] [--kinds eager ours]

12 layers, 768 wide, 256 tokens, bf16 autocast over fp32 weights, gradients clipped, fused AdamW in each.
Times are of steady steps, by events on the device; nothing is read back in between. "reserved": what torch's
allocator had taken from the device at most, capture and compilation included; "steady": what it holds
afterwards, with its cache emptied.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

from ostinato.graphs import graphed_train_step
from ostinato.tools.machine import machine

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH = 12, 768, 12, 50304, 256
KINDS = ("eager", "compiled", "reduce-overhead", "ours", "ours, compiled")
STEPS, ROUNDS, WARMUPS = 20, 5, 8


class Block(nn.Module):
    """Attention and a perceptron behind norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Gpt(nn.Module):
    """The shape of GPT-2 small, with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of the next token."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def make_step(kind: str, device: torch.device) -> Step:
    """One way to train a new model."""
    torch.manual_seed(0)
    model = Gpt().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    if kind.startswith("ours"):
        wrapped: Any = torch.compile if kind.endswith("compiled") else lambda function: function
        return graphed_train_step(
            wrapped(model),
            wrapped(loss_fn),
            optimizer,
            ladder=[LENGTH],
            clip_norm=1.0,
            autocast=torch.bfloat16,
        )
    modes: dict[str, Any] = {"compiled": "default", "reduce-overhead": "reduce-overhead"}

    def loss_of(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return loss_fn(model(ids), targets)

    called_loss: Any = torch.compile(loss_of, mode=modes[kind]) if kind in modes else loss_of

    def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if kind == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad(set_to_none=True)
        loss: torch.Tensor = called_loss(ids, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def milliseconds(step: Step, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """Of a step, once for each round."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for number in range(STEPS):
            step(*batches[number % len(batches)])
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) / STEPS)
    return times


def measured(kind: str, batch_size: int, device: torch.device) -> dict[str, Any]:
    """One row of the result."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_reserved()
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(VOCABULARY, (batch_size, LENGTH + 1), generator=generator) for _ in range(4)]
    batches = [(ids[:, :-1].to(device), ids[:, 1:].to(device)) for ids in drawn]
    began = time.perf_counter()
    step = make_step(kind, device)
    first = float(step(*batches[0]))
    torch.cuda.synchronize()
    ready = time.perf_counter() - began
    for number in range(WARMUPS):
        step(*batches[number % len(batches)])
    times = milliseconds(step, batches)
    last = float(step(*batches[0]))
    peak = torch.cuda.max_memory_reserved() - held
    torch.cuda.empty_cache()
    row = {
        "kind": kind,
        "batch": batch_size,
        "ms": statistics.median(times),
        "ms_rounds": times,
        "tokens_per_s": batch_size * LENGTH / statistics.median(times) * 1e3,
        "first_step_s": ready,
        "first_loss": first,
        "last_loss": last,
        "reserved_mib": peak / 2**20,
        "steady_mib": (torch.cuda.memory_reserved() - held) / 2**20,
    }
    if kind.startswith("ours"):
        report = step.report()  # type: ignore[attr-defined]
        row["capture_ms"] = sum(graph.total_ms for graph in report.graphs)
        row["pool_mib"] = report.pool_bytes / 2**20
        row["eager_steps"] = dict(report.eager_steps)
        assert report.graphs, report
    return row


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    rows = []
    for batch_size in arguments.batches:
        for kind in arguments.kinds:
            rows.append(measured(kind, batch_size, torch.device("cuda")))
            shown = {key: value for key, value in rows[-1].items() if key != "ms_rounds"}
            print(json.dumps(shown), flush=True)
            described = {"benchmark": "training step", "machine": machine(), "length": LENGTH, "rows": rows}
            arguments.file.write_text(json.dumps(described, indent=1) + "\n")


if __name__ == "__main__":
    main()
