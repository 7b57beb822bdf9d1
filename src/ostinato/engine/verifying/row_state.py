"""What graphs leave in rows and in the lines of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ostinato.graphs import CapturedGraph
from ostinato.kernels.sampling.token_lines import LINE_HEAD

from ..core import EngineCore
from ..scheduling.request import IntArray, Request
from ..stepping.device_rows import RESERVED_CELLS
from .made_inputs import MadeStep
from .reference_sampling import SampledFrom


@dataclass(frozen=True)
class RowState:
    """What a forward graph may advance, before it is launched."""

    lengths: IntArray
    last_tokens: IntArray
    cells: torch.Tensor
    num_lines: int

    @classmethod
    def of(cls, core: EngineCore) -> RowState:
        """The present state."""
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
        num_lines = self.num_lines
        if step.num_drafts:
            num_lines += 1
            bunches = list(self._bunches(core, step, graph))
            lengths[list(rows)] = [
                part.start + len(new) for part, new in zip(step.parts, bunches, strict=True)
            ]
            last_tokens[list(rows)] = [new[-1] for new in bunches]
            yield "tokens", sum(self._wrong_in_bunches(core, step, graph, requests, bunches))
        elif runner.samples(graph.descriptor):
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
        yield "lengths", int((runner.lengths.cpu().numpy() != lengths).sum())
        yield "last tokens", int((runner.last_tokens.cpu().numpy() != last_tokens).sum())
        yield "number of lines", abs(int(runner.returned.lines.counts[0]) - num_lines)
        yield "other fields of rows", self._other_cells(core)

    def _bunches(self, core: EngineCore, step: MadeStep, graph: CapturedGraph) -> Iterator[list[int]]:
        """The new tokens of each request of a step with drafts."""
        count, length = graph.descriptor.num_reqs, 1 + step.num_drafts
        line = written_line(core, self.num_lines, count * (1 + length))[1:]
        for at in range(len(step.parts)):
            num_new = min(max(line[count + at], 1), length)
            yield [line[at], *(line[count * (1 + place) + at] for place in range(1, num_new))]

    def _wrong_in_bunches(
        self,
        core: EngineCore,
        step: MadeStep,
        graph: CapturedGraph,
        requests: Sequence[Request],
        bunches: Sequence[list[int]],
    ) -> Iterator[int]:
        """How many tokens of each request do not follow from its draws and drafts; a bunch that ends too
        early or too late counts as one."""
        logits = core.runner.logits
        for at, (part, request, new) in enumerate(zip(step.parts, requests, bunches, strict=True)):
            assert request.params is not None
            if request.params.top_k > 0:
                yield len(new) - 1
                continue
            draws = [
                SampledFrom(request.params, part.start + 1 + place).is_right(
                    token, logits[place * graph.descriptor.num_reqs + at]
                )
                for place, token in enumerate(new)
            ]
            drafts: list[int] = part.request.tokens[part.start + 1 : part.end].tolist()
            accepted = len(new) - 1
            is_whole = accepted == len(drafts) or new[accepted] != drafts[accepted]
            yield draws.count(False) + (new[:accepted] != drafts[:accepted]) + (not is_whole)

    def _other_cells(self, core: EngineCore) -> int:
        """Cells that changed although no graph advances them."""
        rows = core.runner.rows
        now = rows.cells
        moved = torch.zeros_like(now, dtype=torch.bool)
        base = now.data_ptr()
        for tensor in rows.advancing:
            first = (tensor.data_ptr() - base) // 4
            moved[first : first + tensor.nbytes // 4] = True
        moved[:RESERVED_CELLS] = True
        return int(((now != self.cells) & ~moved).sum())


def written_line(core: EngineCore, number: int, count: int) -> list[int]:
    """The number and the tokens in a line of the ring, once they have been written."""
    lines = core.runner.returned.lines
    if lines.counts.is_cuda:
        torch.cuda.synchronize(lines.counts.device)
    line = lines.ring[number % lines.ring.size(0)].tolist()
    return [line[0], *line[LINE_HEAD : LINE_HEAD + count]]


def _sources(step: MadeStep, requests: Sequence[Request]) -> Iterator[SampledFrom]:
    for part, request in zip(step.parts, requests, strict=True):
        assert request.params is not None
        yield SampledFrom(request.params, part.end)
