"""Forward graphs: decode, prefill and mixed steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ostinato.graphs import CapturedGraph
from ostinato.kernels.request_rows import LINE_HEAD

from ..core import EngineCore
from ..device_rows import RESERVED_CELLS
from ..request import IntArray, Request
from ..sampling_params import SamplingParams
from ..scheduled_step import PageUpdate
from .borrowed_pages import HOSTILE, BorrowedPages, relative_errors
from .expected_results import ExpectedResults, logit_errors
from .made_requests import MadeRequest
from .made_steps import MadeStep, Part, decode_steps, mixed_steps
from .outcome import Check
from .reference_sampling import SampledFrom

KINDS = ("plain", "poison")
_STALE_COLUMNS = 4
"""Entries of the page table behind a request's own that name pages of others, as earlier tenants leave."""
_ASKED = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=0.6, seed=1 << 40),
    SamplingParams(temperature=1.0, seed=5, top_k=7),
    SamplingParams(temperature=1.7, seed=3),
)
"""What requests of decode steps ask for, in turn; one of them for more than a decode graph chooses."""


@dataclass
class StepGraphs:
    """Launches forward graphs on made steps and compares everything they leave behind."""

    core: EngineCore
    requests: Sequence[MadeRequest]
    pages: BorrowedPages
    expected: ExpectedResults
    tolerances: dict[str, float]
    generator: np.random.Generator
    _launches: int = 0

    def check(self, graph: CapturedGraph, name: str) -> Iterator[Check]:
        """All that is to be known about one graph."""
        make = decode_steps if graph.descriptor.is_uniform else mixed_steps
        steps = list(make(self.requests, graph.descriptor))
        for step in steps:
            # Poison is in padding and on page 0: the step with the most padding shows what it does.
            for kind in KINDS if step is steps[-1] else KINDS[:1]:
                yield from self._launch(graph, name, step, kind)
        changed = self.pages.num_changed()
        yield Check(name, "all batches", "both", "other pages", changed, 0, "slots that nobody should write")
        if changed:
            self.pages.write_all()
        is_changed = self.pages.has_rest_changed()
        yield Check(name, "all batches", "both", "pages of nobody", float(is_changed), 0)

    def _launch(self, graph: CapturedGraph, name: str, step: MadeStep, kind: str) -> Iterator[Check]:
        runner, batch = self.core.runner, str(step)
        device = runner.lengths.device
        rows = self._rows(len(step.parts))
        asked = [_ASKED[(at + self._launches) % len(_ASKED)] for at in range(len(rows))]
        requests = [_request(*pair) for pair in zip(step.parts, asked, strict=True)]
        self._seat(step, rows, requests, kind)
        slots = torch.from_numpy(step.slots()).to(device)
        stale = torch.from_numpy(step.stale_slots()).to(device)
        self.pages.spoil(stale)
        self.pages.fill_page_0(HOSTILE if kind == "poison" else 0.0)
        if kind == "poison":
            runner.graphs.poison_surroundings()
            runner.logits.fill_(float("nan"))
            runner.hidden.fill_(float("nan"))
        before = _State.of(self.core)
        logits = runner.run_from(graph, step.scheduled(rows, requests), poison=kind == "poison")
        self._launches += 1

        def compared(what: str, errors: torch.Tensor) -> Check:
            at = int(errors.argmax())
            detail = f"worst in row {at} of {errors.numel()}"
            return Check(name, batch, kind, what, float(errors[at]), self.tolerances[what], detail)

        if logits.size(1):
            yield compared("logits", logit_errors(logits, self.expected.logits(step)))
        if not graph.descriptor.is_uniform:
            hidden = runner.hidden[: step.num_tokens].float()
            yield compared("hidden", relative_errors(hidden, self.expected.hidden(step)))
        yield compared("kv", self.pages.errors(slots))
        yield self._behind(name, batch, kind, stale, slots)
        self.pages.write(stale)
        for what, wrong in before.wrong_after(self.core, step, rows, graph, requests, logits):
            yield Check(name, batch, kind, what, float(wrong), 0)

    def _rows(self, count: int) -> list[int]:
        """Other rows every time: what a graph knows of an earlier tenant must not matter."""
        order = self.generator.permutation(self.core.config.max_running_requests)
        rows: list[int] = (1 + order[:count]).tolist()
        return rows

    def _seat(self, step: MadeStep, rows: Sequence[int], requests: Sequence[Request], kind: str) -> None:
        """Everything about the requests that is in rows: as `EngineCore` does it when they join."""
        runner = self.core.runner
        columns = runner.page_table.size(1)
        updates = []
        for part, row, request in zip(step.parts, rows, requests, strict=True):
            own = [self.pages.numbers[place] for place in part.request.places]
            others = self.generator.integers(0, len(self.pages.numbers), _STALE_COLUMNS)
            pages = [*own, *(self.pages.numbers[place] for place in others)][:columns]
            updates.append(PageUpdate(row, 0, tuple(pages)))
            runner.rows.write("lengths", row, part.start)
            runner.rows.write("last_tokens", row, int(part.request.tokens[part.start]))
            request.row = row
        runner.update_pages(updates)
        if self.core.sampler is not None:
            self.core.sampler.join(requests)
            # Padding draws, too, and nobody looks at what.
            runner.rows.write("temperature", 0, 9.0 if kind == "poison" else 0.0)
            runner.rows.write("seeds", 0, 7 if kind == "poison" else 0)
        runner.rows.send()

    def _behind(self, name: str, batch: str, kind: str, stale: torch.Tensor, slots: torch.Tensor) -> Check:
        """What lies behind the step's tokens on their pages is as it was."""
        behind = stale[~torch.isin(stale, slots)]
        wrong = self.pages.num_not_spoilt(behind)
        return Check(name, batch, kind, "slots behind the step", float(wrong), 0)


@dataclass(frozen=True)
class _State:
    """What a forward graph may move on, before it is launched."""

    lengths: IntArray
    last_tokens: IntArray
    cells: torch.Tensor
    num_lines: int

    @classmethod
    def of(cls, core: EngineCore) -> _State:
        runner = core.runner
        return cls(
            runner.lengths.cpu().numpy().copy(),
            runner.last_tokens.cpu().numpy().copy(),
            runner.rows.cells.clone(),
            int(runner.returned.lines.counts[0]),
        )

    def wrong_after(
        self,
        core: EngineCore,
        step: MadeStep,
        rows: Sequence[int],
        graph: CapturedGraph,
        requests: Sequence[Request],
        logits: torch.Tensor,
    ) -> Iterator[tuple[str, int]]:
        """What should be equal, and in how many places it is not."""
        runner = core.runner
        lengths, last_tokens = self.lengths.copy(), self.last_tokens.copy()
        lengths[list(rows)] = [part.end for part in step.parts]
        yield "lengths", int((runner.lengths.cpu().numpy() != lengths).sum())
        num_lines = self.num_lines
        if runner.samples(graph.descriptor):
            num_lines += 1
            line = written_line(core, self.num_lines, len(rows))
            right = [
                request.params.top_k > 0 or source.is_right(token, own)
                for request, source, token, own in zip(
                    requests, _sources(step, requests), line[1:], logits, strict=True
                )
                if request.params is not None
            ]
            yield "tokens", right.count(False)
            last_tokens[list(rows)] = line[1:]
            yield "line", int(line[0] != self.num_lines)
        yield "last tokens", int((runner.last_tokens.cpu().numpy() != last_tokens).sum())
        yield "number of lines", abs(int(runner.returned.lines.counts[0]) - num_lines)
        yield "other fields of rows", self._other_cells(core)

    def _other_cells(self, core: EngineCore) -> int:
        """Cells that no graph moves on, and that changed."""
        rows = core.runner.rows
        now = rows.cells
        moved = torch.zeros_like(now, dtype=torch.bool)
        base = now.data_ptr()
        for tensor in (core.runner.lengths, core.runner.last_tokens):
            first = (tensor.data_ptr() - base) // 4
            moved[first : first + tensor.nbytes // 4] = True
        moved[:RESERVED_CELLS] = True
        return int(((now != self.cells) & ~moved).sum())


def written_line(core: EngineCore, number: int, count: int) -> list[int]:
    """The number and the tokens in a line of the ring, once they are there."""
    lines = core.runner.returned.lines
    if lines.counts.is_cuda:
        torch.cuda.synchronize(lines.counts.device)
    line = lines.ring[number % lines.ring.size(0)].tolist()
    return [line[0], *line[LINE_HEAD : LINE_HEAD + count]]


def _request(part: Part, params: SamplingParams) -> Request:
    return Request("verify", tuple(part.request.tokens[: part.start + 1].tolist()), params)


def _sources(step: MadeStep, requests: Sequence[Request]) -> Iterator[SampledFrom]:
    for part, request in zip(step.parts, requests, strict=True):
        assert request.params is not None
        yield SampledFrom(request.params, part.end)
