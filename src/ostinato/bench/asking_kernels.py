"""What requests that ask for more than plain sampling add to the end of a step of 32, kernel by kernel.

python -m ostinato.bench.asking_kernels benchmarks/results/asking-kernels-h200.json

A graph stands for the step: it goes through more memory than the L2 cache holds, writes logits as flat as
those of a Qwen3-0.6B with random weights, and samples for all. A second one serves those that ask, as in an
engine: it costs what both take less what the first takes alone. It is captured whole, and cut short behind
each of its kernels. Requests with top-p are timed with a token that stays and with one that is
cut off, alone. Last come the kernels' own times by the profiler, which slows down what runs after it: these
overlap.
"""

import argparse
import functools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.sampling.asked import Asked
from ostinato.kernels.sampling.filters.triton_candidate import KEPT
from ostinato.kernels.sampling.filters.triton_cuts import Cuts, Verdicts
from ostinato.kernels.sampling.filters.triton_find_cuts import find_cuts
from ostinato.kernels.sampling.token_lines import LogprobLines, TokenLines
from ostinato.kernels.sampling.triton_adjusted import draw_adjusted
from ostinato.kernels.sampling.triton_amend import amend
from ostinato.kernels.sampling.triton_redraw import redraw_and_return
from ostinato.kernels.sampling.triton_row_end import Parts

from ..tools.layer_step import PlainStep
from ..tools.machine import machine
from ..tools.results import write_json

VOCAB, STEP_ROWS, ROWS = 151_936, 32, 257
FLUSHED_BYTES = 256 << 20
REPLAYS, ROUNDS = 20, 15
FILTERED = "top-p"
KINDS: dict[str, dict[str, float]] = {
    "penalties": {"frequency": 0.5, "repetition": 1.1},
    "logprobs": {"num_logprobs": 5},
    "min_tokens": {"banned_before": 1 << 30},
    FILTERED: {"temperature": 1.0, "top_p": 0.9},
}
CASES = {**{kind: (kind,) for kind in KINDS}, "all": tuple(KINDS), "8 of each": tuple(KINDS) * 8}


def asked_of(kinds: tuple[str, ...]) -> Asked:
    """Row 1 asks for the first of these kinds, and so on."""
    rows = torch.arange(ROWS, dtype=torch.int32, device="cuda")
    none, off = rows * 0, rows * 0.0
    asked = Asked(
        temperature=off,
        seeds=rows.long(),
        lengths=none + 100,
        top_k=none,
        top_p=off + 1,
        min_p=off,
        repetition=off + 1,
        presence=off,
        frequency=off,
        num_biases=none,
        bias_ids=torch.zeros(ROWS, 512, dtype=torch.int32, device="cuda"),
        bias_values=torch.zeros(ROWS, 512, device="cuda"),
        banned=torch.full((ROWS, 16), 7, dtype=torch.int32, device="cuda"),
        banned_before=none,
        num_logprobs=none - 1,
        generated=torch.zeros(ROWS, VOCAB, dtype=torch.int32, device="cuda"),
        in_prompt=torch.zeros(ROWS, VOCAB, dtype=torch.bool, device="cuda"),
        masks=torch.full((ROWS, VOCAB // 32), -1, dtype=torch.int32, device="cuda"),
    )
    asked = asked._replace(**{name: getattr(asked, name).clone() for name in Asked._fields})
    for row, kind in enumerate(kinds, start=1):
        for name, value in KINDS[kind].items():
            getattr(asked, name)[row] = value
    return asked


class Asking:
    """Requests of these kinds, and the kernels that serve them."""

    def __init__(self, logits: Tensor, kinds: tuple[str, ...]) -> None:
        n = len(kinds)
        self.logits, self.kinds, self.asked = logits, kinds, asked_of(kinds)
        self._rows = torch.arange(1, n + 1, dtype=torch.int32, device="cuda")
        self._places = (self._rows - 1) % STEP_ROWS
        self._lines = TokenLines.of(self._rows.new_zeros(ROWS).long(), self._rows[:1].long(), 256, 4)
        self._lines.counts[0] = 1
        self._logprobs = LogprobLines.of(self._lines, 20)
        self._has_filters = FILTERED in kinds

    def run(self, num_kernels: int = 4) -> Tensor:
        """The first kernels of them; verdicts."""
        size = (len(self.kinds), VOCAB)
        parts = Parts.empty(*size, self._logprobs, self.logits.device)
        verdicts = Verdicts.empty(*size, self.logits.device)
        of_rows = (self.logits, self._rows, self._places, self.asked)
        to = (parts, self._lines, self._logprobs)
        drawn = draw_adjusted(*of_rows, has_filters=self._has_filters)
        if num_kernels > 1:
            amend(*of_rows, drawn, verdicts, *to, has_filters=self._has_filters)
        cuts = Cuts.empty(*size, self.logits.device)
        if num_kernels > 2 and self._has_filters:
            of_filters = (self._rows, self.asked.filters, drawn.surveyed, verdicts.verdicts, drawn.arrived)
            find_cuts(drawn.logits, *of_filters, cuts)
        if num_kernels > 3 and self._has_filters:
            redraw_and_return(*of_rows, drawn, verdicts.verdicts, cuts, *to)
        return verdicts.verdicts

    def choose_draws(self, *, that_stay: bool) -> None:
        """Move those with filters to places whose draws stay, or are cut off."""
        filtered = torch.tensor([kind == FILTERED for kind in self.kinds], device="cuda")
        for _ in range(1000):
            stays = self.run(2)[: len(self.kinds)] == KEPT.value
            wrong = filtered & (stays != that_stay)
            if not wrong.any():
                return
            self.asked.lengths[1 : len(self.kinds) + 1] += wrong.int()
        raise AssertionError("no such draw found")


def cases(logits: Tensor) -> Iterator[tuple[str, Asking]]:
    """What is measured; a graph of one is good until the next one comes, for it reads what the case holds."""
    for case, kinds in CASES.items():
        asking = Asking(logits, kinds)
        for stays in (True, False) if FILTERED in kinds else (True,):
            asking.choose_draws(that_stay=stays)
            yield (case if stays else f"{case}, cut off"), asking


def captured(function: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of it."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def microseconds(*graphs: torch.cuda.CUDAGraph) -> float:
    """Of one replay of all of them; median over rounds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(ROUNDS):
        begin.record()
        for _ in range(REPLAYS):
            for graph in graphs:
                graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / REPLAYS)
    return statistics.median(times)


def by_profiler(step: torch.cuda.CUDAGraph, asking: torch.cuda.CUDAGraph) -> dict[str, float]:
    """Mean microseconds of the kernels of the second graph that are not in the first."""

    def times(*graphs: torch.cuda.CUDAGraph) -> dict[str, list[float]]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(REPLAYS):
                for graph in graphs:
                    graph.replay()
            torch.cuda.synchronize()
        found = defaultdict(list)
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                found[event.name].append(event.device_time)
        return found

    alone = times(step)
    return {
        name: round(statistics.mean(us), 2) for name, us in times(step, asking).items() if name not in alone
    }


@torch.no_grad()
def main(file: Path) -> None:
    """Measure, print and write."""
    generator = torch.Generator("cuda").manual_seed(0)
    source = 0.64 * torch.randn(STEP_ROWS, VOCAB, device="cuda", generator=generator)
    logits, plain = torch.empty_like(source), PlainStep(STEP_ROWS, 0.0)
    flushed = torch.zeros(FLUSHED_BYTES // 4, device="cuda")

    def step_once() -> None:
        flushed.add_(1.0)
        logits.copy_(source)
        plain(logits)

    step = captured(step_once)
    microseconds(step)
    rows: list[dict[str, Any]] = []
    profiled: dict[str, dict[str, float]] = {}
    for name, asking in cases(logits):
        parts = [captured(functools.partial(asking.run, number)) for number in (1, 2, 3, 4)]
        alone = microseconds(step)
        us = [round(microseconds(step, part) - alone, 2) for part in parts]
        again = round(microseconds(step, parts[-1]) - microseconds(step), 2)
        rows.append({"case": name, "us_behind_1_2_3_4_kernels": us, "whole_again": again})
        print(f"{name:20s} {' '.join(f'{each:7.2f}' for each in us)}   again {again:7.2f}", flush=True)
    for name, asking in cases(logits):
        profiled[name] = by_profiler(step, captured(asking.run))
        print(f"{name:20s}", ", ".join(f"{kernel} {us}" for kernel, us in profiled[name].items()), flush=True)
    described = {"benchmark": "asking kernels", "machine": machine(), "vocabulary": VOCAB}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(described | {"rows": rows, "kernels_us": profiled}, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="where the result goes")
    main(parser.parse_args().file)
