"""A training step of a GPT-2 small: eager, through torch.compile, and from graphs.

ostinato bench training benchmarks/results/training-h200.json [--batches 1 4 32] [--kinds eager ours]

12 layers, 768 wide, 256 tokens, bf16 autocast over fp32 weights, gradients clipped, fused AdamW in each.
"ours, compiled": model and loss function are compiled apart; "ours, joint": as one, as in the others.
Times are of steady steps, by events on the device; nothing is read back in between. "reserved": what torch's
allocator had taken from the device at most, capture and compilation included; "steady": what it holds
afterwards, with its cache emptied; "live": what tensors take of that.

Each row is measured by a process of its own. All get ready at the same time ("compile_s" is with that
company) and then wait. The rounds of all rows of a batch take turns, each on a device that does nothing else:
under load its clock falls, and whoever comes later would be slower. So would whoever always comes behind one
that lets the device rest be faster: every round has an order of its own, and begins with steps that do not
count. The file is written after every batch.
"""

import argparse
import json
import os
import queue
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ostinato.graphs import graphed_train_step

from ..tools.machine import machine
from ..tools.results import write_json

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH = 12, 768, 12, 50304, 256
KINDS = ("eager", "compiled", "reduce-overhead", "ours", "ours, compiled", "ours, joint")
STEPS, ROUNDS, WARMUPS = 20, 12, 8
LIMIT = 180
"""Seconds that a process may take to get ready."""


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
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def is_compiled(kind: str) -> bool:
    """Whether a kind goes through torch.compile."""
    return kind not in ("eager", "ours")


class Run:
    """One way to train a new model."""

    def __init__(self, kind: str, batch_size: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.kind, self.batch_size, self.device = kind, batch_size, device
        generator = torch.Generator().manual_seed(1)
        drawn = [torch.randint(VOCABULARY, (batch_size, LENGTH + 1), generator=generator) for _ in range(4)]
        self.batches = [(ids[:, :-1].to(device), ids[:, 1:].to(device)) for ids in drawn]
        self.plain = Gpt().to(device)
        self.optimizer = torch.optim.AdamW(self.plain.parameters(), lr=3e-4, fused=True)
        wrapped: Any = torch.compile if kind == "ours, compiled" else lambda function: function
        self.model, self.loss_fn = wrapped(self.plain), wrapped(loss_fn)
        self.joint: Any = None
        modes: dict[str, Any] = {"compiled": "default", "reduce-overhead": "reduce-overhead"}
        self.loss_of: Any = torch.compile(self._loss_of, mode=modes[kind]) if kind in modes else self._loss_of

    def _loss_of(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            return self.loss_fn(self.model(ids), targets)  # type: ignore[no-any-return]

    def compile(self) -> None:
        """Whatever is compiled, forward and backward; parameters stay as they are."""
        if self.kind == "ours, joint":
            self.joint = self.step()
            self.joint._loss(*self.batches[0], None).backward()
        else:
            self.loss_of(*self.batches[0]).backward()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> Step:
        """Called for every batch."""
        if self.joint is not None:
            return self.joint
        if self.kind.startswith("ours"):
            return graphed_train_step(
                self.model,
                self.loss_fn,
                self.optimizer,
                clip_norm=1.0,
                compile=self.kind == "ours, joint",
                autocast=torch.bfloat16,
            )

        def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            if self.kind == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            self.optimizer.zero_grad(set_to_none=True)
            loss: torch.Tensor = self.loss_of(ids, targets)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.plain.parameters(), 1.0)
            self.optimizer.step()
            return loss.detach()

        return step


def milliseconds(step: Step, batches: Batches) -> float:
    """Of a step, in one round."""
    for number in range(WARMUPS):
        step(*batches[number % len(batches)])
    torch.cuda.synchronize()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for number in range(STEPS):
        step(*batches[number % len(batches)])
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / STEPS


def measured(run: Run) -> Iterator[dict[str, Any]]:
    """Nothing yet after the first steps and after each round, then one row of the result."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    step = run.step()
    first = float(step(*run.batches[0]))
    torch.cuda.synchronize()
    ready = time.perf_counter() - began
    for number in range(WARMUPS):
        step(*run.batches[number % len(run.batches)])
    torch.cuda.synchronize()
    yield {}
    times = []
    for _ in range(ROUNDS):
        times.append(milliseconds(step, run.batches))
        yield {}
    last = float(step(*run.batches[0]))
    peak = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    row = {
        "ms": statistics.median(times),
        "ms_rounds": times,
        "tokens_per_s": run.batch_size * LENGTH / statistics.median(times) * 1e3,
        "first_step_s": ready,
        "first_loss": first,
        "last_loss": last,
        "reserved_mib": peak / 2**20,
        "steady_mib": torch.cuda.memory_reserved() / 2**20,
        "live_mib": torch.cuda.memory_allocated() / 2**20,
    }
    if run.kind.startswith("ours"):
        report = step.report()  # type: ignore[attr-defined]
        row["capture_ms"] = sum(graph.total_ms for graph in report.graphs)
        row["pool_mib"] = report.pool_bytes / 2**20
        row["eager_steps"] = dict(report.eager_steps)
        assert report.graphs, report
    yield row


def measure_when_told(kind: str, batch_size: int) -> None:
    """What the process of one row does: it gets ready and says so; for every line that it reads it does one
    part of `measured`, and prints what came of it."""
    torch.set_float32_matmul_precision("high")
    run = Run(kind, batch_size, torch.device("cuda"))
    described: dict[str, Any] = {"kind": kind, "batch": batch_size}
    if is_compiled(kind):
        began = time.perf_counter()
        run.compile()
        torch.cuda.synchronize()
        described["compile_s"] = time.perf_counter() - began
    print("ready", flush=True)
    parts = measured(run)
    while sys.stdin.readline():
        row = next(parts)
        print(json.dumps(described | row if row else {}), flush=True)


class Measurer:
    """The process of one row, seen from outside."""

    def __init__(self, kind: str, batch_size: int) -> None:
        self.kind, self.batch_size = kind, batch_size
        command = [sys.executable, "-m", "ostinato.bench.training", "--row", kind, str(batch_size)]
        few = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}  # many processes compile at the same time
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **few},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def wait(self) -> None:
        """Until it is ready."""
        self._next("ready")

    def part(self) -> dict[str, Any]:
        """Let it do one part of its measurement: the row, if it was the last."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._next("{"))
        return found

    def _next(self, beginning: str) -> str:
        while line := self._lines.get(timeout=LIMIT):
            if line.startswith(beginning):
                return line
        raise RuntimeError("the process ended")

    def stop(self) -> None:
        """Whatever it does."""
        self._process.kill()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--row", nargs=2, metavar=("KIND", "BATCH"), help="one row, when told to")
    arguments = parser.parse_args()
    if arguments.row:
        measure_when_told(arguments.row[0], int(arguments.row[1]))
        return
    if arguments.file is None:
        parser.error("where to?")
    batches = [[Measurer(kind, batch) for kind in arguments.kinds] for batch in arguments.batches]
    rows: list[dict[str, Any]] = []
    try:
        for measurer in chain(*batches):
            with suppress(RuntimeError, queue.Empty):
                measurer.wait()
        for measurers in batches:
            found = rows_of(measurers)
            for row in found:
                print(json.dumps({key: row[key] for key in row if key != "ms_rounds"}), flush=True)
            rows += found
            described = {"benchmark": "training step", "machine": machine(), "length": LENGTH, "rows": rows}
            write_json(described, arguments.file)
    finally:
        for measurer in chain(*batches):
            measurer.stop()


def rows_of(measurers: list[Measurer]) -> list[dict[str, Any]]:
    """What they measured in turns, or what became of them."""
    rows: dict[Measurer, dict[str, Any]] = {}
    draw = random.Random(0)
    for _ in range(ROUNDS + 2):
        for measurer in draw.sample(measurers, len(measurers)):
            if "error" in rows.get(measurer, {}):
                continue
            try:
                rows[measurer] = measurer.part()
            except (RuntimeError, OSError, queue.Empty) as error:
                rows[measurer] = {"kind": measurer.kind, "batch": measurer.batch_size, "error": repr(error)}
    return [rows[measurer] for measurer in measurers]


if __name__ == "__main__":
    main()
