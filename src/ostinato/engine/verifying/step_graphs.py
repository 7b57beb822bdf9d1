"""Forward graphs: decode, prefill and mixed steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ostinato.graphs import BatchShape, CapturedGraph
from ostinato.kernels.constants import PAGE_SIZE
from ostinato.kernels.lora import NO_ADAPTER

from ..core import EngineCore
from ..parameters.sampling_params import SamplingParams
from ..scheduling.request import IntArray, Request
from ..scheduling.scheduled_step import PageUpdate
from ..stepping.device_rows import RESERVED_CELLS, DeviceRows
from ..stepping.planned_graphs import LAST_TOKENS
from ..token_ids import token_array
from .borrowed_pages import BorrowedPages, relative_errors
from .expected_results import ExpectedResults, logit_errors
from .made_inputs import MadeAdapters, MadeRequest, MadeStep, Part, decode_steps, mixed_steps
from .outcome import Check
from .row_state import RowState

KINDS = ("plain", "poison")
_STALE_COLUMNS = 4
"""Page table entries after a request's own that name others' pages, as an earlier tenant would leave."""
_ASKED = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=0.6, seed=1 << 40),
    SamplingParams(temperature=1.0, seed=5, top_k=7),
    SamplingParams(temperature=1.7, seed=3),
)
"""What requests of decode steps ask for, in turn; one of them asks for more than a decode graph can do."""


@dataclass
class StepGraphs:
    """Launches forward graphs on made steps and compares everything they leave behind."""

    core: EngineCore
    requests: Sequence[MadeRequest]
    pages: BorrowedPages
    expected: ExpectedResults
    tolerances: dict[str, float]
    generator: np.random.Generator
    adapters: MadeAdapters | None = None
    """Adapters of some of the requests."""
    _launches: int = 0

    def check(self, graph: CapturedGraph, name: str) -> Iterator[Check]:
        """All checks of one graph."""
        make = decode_steps if graph.descriptor.is_uniform else mixed_steps
        steps = list(make(self.requests, graph.descriptor))
        for step in steps:
            # Poison is in padding and on page 0: the step with the most padding shows its effect.
            for kind in KINDS if step is steps[-1] else KINDS[:1]:
                yield from self._launch(graph, name, step, kind)
        yield from self._every_key_counts(graph, name, max(steps, key=_most_context))
        changed = self.pages.num_changed()
        yield Check(name, "all batches", "both", "other pages", changed, 0, "slots that must not be written")
        if changed:
            self.pages.write_all()
        is_changed = self.pages.has_rest_changed()
        yield Check(name, "all batches", "both", "pages of nobody", float(is_changed), 0)

    def _launch(self, graph: CapturedGraph, name: str, step: MadeStep, kind: str) -> Iterator[Check]:
        runner, batch = self.core.runner, str(step)
        rows, requests = self._seat(step, kind)
        slots, stale = self._on_device(step.slots()), self._on_device(step.stale_slots())
        self.pages.spoil(stale)
        self.pages.fill_page_0(self.pages.hostile if kind == "poison" else 0.0)
        if kind == "poison":
            runner.graphs.poison_surroundings()
            runner.logits.fill_(float("nan"))
            runner.hidden.fill_(float("nan"))
        before = RowState.of(self.core)
        logits = runner.run_from(graph, step.scheduled(rows, requests), poison=kind == "poison")

        def compared(what: str, errors: torch.Tensor) -> Check:
            at = int(errors.argmax())
            detail = f"worst in row {at} of {errors.numel()}"
            return Check(name, batch, kind, what, float(errors[at]), self.tolerances[what], detail)

        if logits.size(1):
            yield compared("logits", self._logit_errors(graph, step))
        if not graph.descriptor.is_uniform and graph.descriptor.extra != LAST_TOKENS:
            hidden = runner.hidden[: step.num_tokens].float()
            yield compared("hidden", relative_errors(hidden, self.expected.hidden(step)))
        yield compared("kv", self.pages.errors(slots))
        yield self._behind(name, batch, kind, stale, slots)
        self.pages.write(stale)
        for what, wrong in before.wrong_after(self.core, step, rows, graph, requests, logits):
            yield Check(name, batch, kind, what, float(wrong), 0)

    def _logit_errors(self, graph: CapturedGraph, step: MadeStep) -> torch.Tensor:
        """Errors of each request's last token; with drafts, of all tokens: all first ones, all second
        ones..."""
        count, logits = len(step.parts), self.core.runner.logits
        if not step.num_drafts:
            return logit_errors(logits[:count], self.expected.logits(step))
        errors = [
            logit_errors(
                logits[place * graph.descriptor.num_reqs :][:count], self.expected.logits(step.up_to(place))
            )
            for place in range(1 + step.num_drafts)
        ]
        return torch.cat(errors)

    def _every_key_counts(self, graph: CapturedGraph, name: str, step: MadeStep) -> Iterator[Check]:
        """A key of each context gets an enormous value: a request that sees it must give another result.

        In a long context a single key hardly moves the result, and missing it would hide behind rounding.
        """
        keys = [self._some_key(part) for part in step.parts]
        looked_at = [at for at, key in enumerate(keys) if key is not None]
        if not looked_at or not self.core.runner.logits.size(1):
            return
        parts = zip(step.parts, keys, strict=True)
        chosen = [part.request.slots(key, key + 1) for part, key in parts if key is not None]
        slots, stale = self._on_device(np.concatenate(chosen)), self._on_device(step.stale_slots())
        rows, requests = self._seat(step, "plain")
        self.pages.spoil(stale)
        self.pages.spoil_values(slots)
        self.core.runner.run_from(graph, step.scheduled(rows, requests))
        changes = self._logit_errors(graph, step).view(-1, len(rows)).amin(0)[looked_at]
        self.pages.write(torch.cat([slots, stale]))
        unseen = [looked_at[at] for at in (changes <= self.tolerances["logits"]).nonzero()[:, 0].tolist()]
        first = unseen[0] if unseen else 0
        detail = f"key {keys[first]} of request {first} with {step.parts[first].start} does not matter"
        batch = f"{step}, one value of each enormous"
        yield Check(name, batch, "plain", "keys unseen", float(len(unseen)), 0, detail if unseen else "")

    def _some_key(self, part: Part) -> int | None:
        """A position before the step that its last token sees in every layer, often one at an edge."""
        windows = [window for window in self.core.loaded.model.config.layer_windows if window is not None]
        first = max(0, part.end - min(windows)) if windows else 0
        if first >= part.start:
            return None
        page = max(first, (part.start - 1) // PAGE_SIZE * PAGE_SIZE)
        edges = [first, part.start - 1, page, max(first, page - 1)]
        anywhere = int(self.generator.integers(first, part.start))
        return int(self.generator.choice([*edges, anywhere, anywhere]))

    def _on_device(self, slots: IntArray) -> torch.Tensor:
        return torch.from_numpy(slots).to(self.core.runner.lengths.device)

    def _rows(self, count: int) -> list[int]:
        """Other rows every time: what a graph knows of an earlier tenant must not matter."""
        order = self.generator.permutation(self.core.config.max_running_requests)
        rows: list[int] = (1 + order[:count]).tolist()
        return rows

    def _seat(self, step: MadeStep, kind: str) -> tuple[list[int], list[Request]]:
        """Give the step's requests rows, and write everything that belongs there as `EngineCore` does."""
        runner = self.core.runner
        rows = self._rows(len(step.parts))
        self._launches += 1
        asked = [_ASKED[(at + self._launches) % len(_ASKED)] for at in range(len(rows))]
        requests = [_request(*pair) for pair in zip(step.parts, asked, strict=True)]
        columns = runner.page_table.size(1)
        updates = []
        for part, row, request in zip(step.parts, rows, requests, strict=True):
            own = [self.pages.numbers[place] for place in part.request.places]
            others = self.generator.integers(0, len(self.pages.numbers), _STALE_COLUMNS)
            pages = [*own, *(self.pages.numbers[place] for place in others)][:columns]
            updates.append(PageUpdate(row, 0, np.array(pages)))
            runner.rows.write("lengths", row, part.start)
            runner.rows.write("last_tokens", row, int(part.request.tokens[part.start]))
            if step.num_drafts:
                runner.rows.write("drafts", row, part.request.tokens[part.start + 1 : part.end].tolist())
            if runner.adapters is not None:
                slot = NO_ADAPTER if self.adapters is None else self.adapters.slot_of(part.request)
                runner.rows.write("adapter_slots", row, slot)
            request.row = row
        runner.update_pages(updates)
        runner.rows.write_rows("prefix_lens", np.array(rows), step.shared_prefix)
        if self.core.sampler is not None:
            self.core.sampler.join(requests)
            # Padding draws too, and its tokens are ignored.
            runner.rows.write("temperature", 0, 9.0 if kind == "poison" else 0.0)
            runner.rows.write("seeds", 0, 7 if kind == "poison" else 0)
        runner.rows.send()
        return rows, requests

    def _behind(self, name: str, batch: str, kind: str, stale: torch.Tensor, slots: torch.Tensor) -> Check:
        """Check that slots after the step's tokens on their pages are unchanged."""
        behind = stale[~torch.isin(stale, slots)]
        wrong = self.pages.num_not_spoilt(behind)
        return Check(name, batch, kind, "slots behind the step", float(wrong), 0)


def _most_context(step: MadeStep) -> tuple[int, int]:
    return len(step.parts), max(part.start for part in step.parts)


def _request(part: Part, params: SamplingParams) -> Request:
    return Request("verify", token_array(part.request.tokens[: part.start + 1].tolist()), params)


def check_row_graph(
    rows: DeviceRows, graph: CapturedGraph, name: str, generator: np.random.Generator
) -> Iterator[Check]:
    """Send random values to random cells through one graph; everything else must stay."""
    with rows.unchanged():  # other graphs depend on the rows, above all on row 0
        yield from _scattered(rows, graph, name, generator)


def _scattered(
    rows: DeviceRows, graph: CapturedGraph, name: str, generator: np.random.Generator
) -> Iterator[Check]:
    full, num_cells = graph.descriptor.num_reqs, rows.cells.numel()
    for kind, wanted in (("plain", full), ("plain", max(1, full // 3)), ("poison", max(1, full // 3))):
        count = min(wanted, num_cells - RESERVED_CELLS)
        places = RESERVED_CELLS + generator.permutation(num_cells - RESERVED_CELLS)[:count]
        values = generator.integers(-(1 << 31), 1 << 31, count).astype(np.int32)
        expected = rows.cells.cpu().clone()
        expected[torch.from_numpy(places)] = torch.from_numpy(values)
        buffers, shape = rows.scatter.buffers, BatchShape.decode(count)
        batch = {"places": places, "values": values}
        buffers.fill(batch, shape, graph.descriptor, poison=kind == "poison")
        rows.scatter.launch(graph)
        wrong = (rows.cells.cpu() != expected)[RESERVED_CELLS:].sum()
        yield Check(name, f"{count} cells", kind, "cells", float(wrong), 0)
