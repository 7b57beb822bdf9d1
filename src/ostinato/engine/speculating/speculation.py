"""Drafts and their verification, alongside the forward graphs of a `ModelRunner`.

A step of k drafts is two launches: the drafter's graph, which writes `drafts` of its rows, and the forward
pass over the last token and the drafts of each row, which ends with acceptance (docs/speculation.md). If
there is no full graph for that, the forward pass runs like a prompt's, and acceptance after it: `run_tail`.

Requests that use filters, biases or the like get one token from this, as if they had no drafts. A further
graph then chooses all of their tokens, accepts, and returns them in a line of its own: `run_asking`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ostinato.graphs import (
    BatchDescriptor,
    BatchShape,
    CudaGraphRunner,
    GraphKey,
    GraphMode,
    Report,
    capture_keys,
)
from ostinato.graphs.capturing.recorder import Step
from ostinato.kernels.attention.batch import AttentionBatch
from ostinato.kernels.decode_inputs import request_rows
from ostinato.kernels.sampling.asked import Asked
from ostinato.kernels.sampling.plain import PlainSettings
from ostinato.kernels.sampling.token_lines import TokenLines
from ostinato.kernels.speculation.state import SpecState
from ostinato.kernels.speculation.verification import VerifyInputs, accept, begin_verify, tokens_of_asking

from ..parameters.sampling_params import SamplingParams
from ..scheduling.request import IntArray, Request
from ..scheduling.request_drafts import RequestDrafts
from ..scheduling.scheduled_step import PLACEHOLDER, ScheduledStep
from .config import SpeculativeConfig, draft_tiers
from .counts import DraftCounts, SpeculationReport
from .eagle_graphs import EagleGraphManager
from .fields import LONGER, UNCHANGED, VERIFYING
from .ngram_drafter import NgramDrafter
from .policy import DraftPolicy
from .row_graphs import row_graphs
from .target import Bunch, Target


class Speculation:
    """Drafting, the number of drafts, and acceptance."""

    def __init__(self, runner: Target, config: SpeculativeConfig, drafter: Drafter) -> None:
        self.config = config
        self.drafter = drafter
        self._runner = runner
        rows = runner.rows
        history = rows["history"] if config.method == "ngram" else None
        self.state = SpecState(
            rows["lengths"],
            rows["last_tokens"],
            rows["drafts"],
            rows["num_accepted"],
            rows["draft_limits"],
            history,
        )
        self._settings = PlainSettings(rows["is_plain"], rows["temperature"], rows["seeds"], rows["lengths"])
        self._rates = None
        if config.synthetic_rates is not None:
            self._rates = torch.tensor(
                config.synthetic_rates, dtype=torch.float32, device=runner.config.device
            )
        self._can_draft = np.zeros(runner.config.max_rows, dtype=bool)
        self.counts = DraftCounts(config.num_speculative_tokens)
        """Drafts and their acceptance."""
        self.single_requests: Counter[str] = Counter()
        """Requests that get one token a step, by the feature that requires it."""
        self.policy = DraftPolicy(config, runner.config.verify_ladder)
        """Decides how many drafts a step has."""
        is_piecewise = runner.config.graph_mode.decode is GraphMode.PIECEWISE
        self.tail = self._make_graphs(self._tail, is_captured=is_piecewise)
        """Acceptance, if it is not part of the forward graph."""
        self.asking = self._make_graphs(self._accept_asking, is_captured=True, padding=False)
        """Acceptance for requests that need more than plain sampling."""
        self.asked: Asked | None = None
        """What those requests ask for; set by the sampler."""
        self._asks = np.zeros(runner.config.max_rows, dtype=bool)
        self._all_plain = torch.ones_like(rows["is_plain"])

    # -- graphs ------------------------------------------------------------------------------------

    def verify_keys(self, mode: GraphMode) -> list[GraphKey]:
        """The forward graphs that verify drafts."""
        if mode.decode is not GraphMode.FULL:
            return []
        config = self._runner.config
        return [
            GraphKey(key.mode, replace(key.descriptor, extra=VERIFYING))
            for count in draft_tiers(self.config)
            for key in capture_keys(
                GraphMode.FULL_DECODE_ONLY,
                config.verify_ladder,
                None,
                query_len=1 + count,
                max_reqs=config.verify_ladder.limit,
                lora_cases=config.lora_cases,
                context_buckets=config.context_buckets,
            )
        ]

    def _make_graphs(self, step: Step, *, is_captured: bool, padding: bool = True) -> CudaGraphRunner:
        tiers = draft_tiers(self.config) if is_captured else ()
        return row_graphs(
            self._runner,
            step,
            [1 + count for count in tiers],
            most=1 + self._runner.config.max_drafts,
            kernels_of=lambda key: key.descriptor.num_tokens,
            state=self._runner.returned.state,
            padding=padding,
        )

    @property
    def runners(self) -> tuple[CudaGraphRunner, ...]:
        """All graphs but the forward ones."""
        return self.drafter.graphs, self.tail, self.asking

    def capture(self, *, some: bool = False) -> None:
        """Capture the graphs of drafts, and of acceptance if separate; `some`: only the largest of each."""
        for graphs in self.runners:
            graphs.capture(graphs.keys[:1] if some else None, progress=False)

    def try_out(self) -> None:
        """Run everything that has its own kernels once, without a trace."""
        self.drafter.try_out()
        for graphs in (self.tail, self.asking):
            for key in graphs.keys[:1]:
                graphs.try_out(key)

    def drop(self) -> None:
        """Forget all graphs."""
        for graphs in self.runners:
            graphs.drop()

    def summary(self) -> SpeculationReport:
        """What drafts gained since the start, and why there were none."""
        eager = [graphs.eager_steps for graphs in self.runners]
        sizes = self.policy.chosen
        return SpeculationReport(
            method=self.config.method,
            drafts=self.counts.read(),
            chosen=sizes,
            speed_up={size: found for size in sizes if (found := self.policy.speed_up(size)) is not None},
            single_requests=dict(self.single_requests),
            steps_without=dict(self.policy.steps_without),
            eager_drafts={str(reason): count for reason, count in eager[0].items()},
            eager_acceptance={str(reason): count for reason, count in (eager[1] + eager[2]).items()},
        )

    def report(self) -> Report:
        """Graphs of drafts and acceptance, and eager runs by reason."""
        return Report.joined([graphs.report() for graphs in self.runners])

    def named_tensors(self) -> dict[str, Tensor]:
        """What forward graphs read in addition."""
        found = {"drafts": self.state.drafts, "num_accepted": self.state.num_accepted}
        found |= self.drafter.named_tensors()
        found["draft_limits"] = self.state.limits
        found["asking_draft_limits"] = self._runner.rows["asking_draft_limits"]
        return found if self.state.history is None else {**found, "history": self.state.history}

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Requests seated inside are forgotten at the end."""
        can_draft, asks, single = self._can_draft.copy(), self._asks.copy(), self.single_requests.copy()
        try:
            yield
        finally:
            self._can_draft, self._asks, self.single_requests = can_draft, asks, single

    # -- requests ----------------------------------------------------------------------------------

    def seat(self, request: Request, params: SamplingParams, *, is_plain: bool) -> None:
        """Write how many drafts of a newcomer can be accepted, and by which graph."""
        follows = request.rules is not None and request.rules.follows_tokens
        why = why_single(params, is_processed=request.is_processed, follows_tokens=follows)
        row, most, write = request.row, self.config.num_speculative_tokens, self._runner.rows.write
        self._can_draft[row], self._asks[row] = why is None, why is None and not is_plain
        write("draft_limits", row, most if is_plain else 0)
        write("asking_draft_limits", row, most if self._asks[row] else 0)
        if why is not None and not request.num_preemptions:
            self.single_requests[why] += 1

    def asking_in(self, step: ScheduledStep) -> IntArray:
        """bool [R]: which requests of a step have drafts verified and need more than plain sampling."""
        found: IntArray = self._asks[step.rows]
        return found

    def choose(self, rows: IntArray) -> int:
        """How many drafts the next step has, if the requests in these rows decode."""
        return self.policy.choose(len(rows), int(np.count_nonzero(self._can_draft[rows])))

    def note(self, step: ScheduledStep, num_new: IntArray, accepted: IntArray) -> None:
        """Count the results of a step's drafts; `accepted`: whose tokens were taken."""
        drafted = accepted & self._can_draft[step.rows]
        if drafted.any():
            self.counts.add(step.num_drafts, num_new[drafted] - 1)
            self.policy.note(step.num_drafts, num_new[drafted] - 1)
            for at in np.flatnonzero(drafted).tolist():
                request = step.requests[at]
                request.drafts = request.drafts or RequestDrafts()
                request.drafts.add(step.num_drafts, int(num_new[at]) - 1)

    def note_cost(self, step: ScheduledStep, seconds: float | None) -> None:
        """The device time of a decode step, if known."""
        if seconds is not None:
            self.policy.note_cost(step.num_requests, step.num_drafts, seconds)

    # -- a step ------------------------------------------------------------------------------------

    def draft(self, step: ScheduledStep) -> None:
        """Launch the drafts of a step; if it has none, make sure that later ones miss nothing."""
        if step.num_drafts:
            self.drafter.run(step.rows, step.num_drafts)
        else:
            self.drafter.catch_up(step.rows[: step.num_requests - len(step.prompt_tokens)])

    def begin(self, req_rows: Tensor, query_len: int) -> VerifyInputs:
        """Captured: the inputs of a forward pass over the last token and the drafts of each row. The drafter
        has recorded when the step began."""
        state = self.state
        return begin_verify(req_rows, query_len, state.lengths, state.last_tokens, state.drafts, None)

    def accept(self, logits: Tensor, req_rows: Tensor, query_len: int, lines: TokenLines) -> None:
        """Captured: draw, accept drafts, advance rows, and leave the new tokens in the next line."""
        accept(logits, req_rows, query_len, self._settings, self.state, self._rates, lines)

    def fill_in(
        self,
        input_ids: Tensor,
        positions: Tensor,
        token_rows: Tensor,
        req_rows: Tensor,
        seq_lens: Tensor,
        query_lens: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Captured in steps of mixed lengths: fill in tokens, positions and context lengths that only the
        device knows, and set the new lengths of rows.

        A token below 0 stands for its row's last token, or for the draft that its number selects, at that
        one's position. A context length of LONGER or UNCHANGED counts from the row's current length.
        """
        state = self.state
        own, count = state.lengths.index_select(0, req_rows), state.drafts.size(1)
        behind = PLACEHOLDER - input_ids
        drafts = state.drafts.index_select(0, token_rows).gather(
            1, (behind - 1).clamp(0, count - 1).unsqueeze(1)
        )
        last = state.last_tokens.index_select(0, token_rows)
        pending = torch.where(behind > 0, drafts.squeeze(1).long(), last)
        of_tokens = state.lengths.index_select(0, token_rows).long() + behind
        is_known = input_ids >= 0
        whole = torch.where(seq_lens > LONGER, seq_lens, own + query_lens)
        grown = torch.where(seq_lens == UNCHANGED, own, whole)
        request_rows.set_lengths(req_rows, state.lengths, grown)
        return torch.where(is_known, input_ids, pending), torch.where(is_known, positions, of_tokens), whole

    def run_tail(self, step: ScheduledStep) -> Bunch:
        """Accept drafts after a forward pass that could not; returns the layout of the new tokens."""
        shape = BatchShape.decode(step.num_requests, step.query_len)
        decision = self.tail.decide(shape)
        self.tail.run({"req_rows": step.rows}, shape)
        return Bunch((decision.descriptor or shape.as_descriptor()).num_reqs, step.query_len)

    def _tail(self, req_rows: Tensor, descriptor: BatchDescriptor) -> tuple[()]:
        assert descriptor.query_len is not None
        self._runner.verify(self._runner.hidden[: descriptor.num_tokens], req_rows, descriptor.query_len)
        return ()

    def run_asking(self, step: ScheduledStep, is_asking: IntArray, bunch: Bunch) -> None:
        """Choose the tokens of the requests that need more, and accept. The step has already given them one
        token in its line; this writes another line of the same layout, so only a graph of equal size fits."""
        rows = np.zeros(bunch.num_requests, dtype=np.int32)
        rows[: step.num_requests] = np.where(is_asking, step.rows, 0)
        self.asking.run({"req_rows": rows}, BatchShape.decode(bunch.num_requests, bunch.query_len))

    def _accept_asking(self, req_rows: Tensor, descriptor: BatchDescriptor) -> tuple[()]:
        assert self.asked is not None
        assert descriptor.query_len is not None
        runner, state, count = self._runner, self.state, descriptor.num_reqs
        logits, is_real = runner.logits[: descriptor.num_tokens], req_rows != 0
        places = torch.arange(descriptor.num_tokens, dtype=torch.int32, device=logits.device)
        found = []
        for at, lines in enumerate(places.split(count)):
            # The step has already advanced them by one.
            asked = self.asked._replace(lengths=state.lengths + at)
            found.append(tokens_of_asking(logits, req_rows, lines, asked))
        tokens = torch.cat(found).unsqueeze(1)
        # Each line keeps a single token, so acceptance can only draw that one.
        theirs = is_real.repeat(descriptor.query_len).unsqueeze(1)
        kept = torch.where(theirs, 0.0, logits.gather(1, tokens))
        logits.masked_fill_(theirs, float("-inf")).scatter_(1, tokens, kept)
        state.lengths.index_add_(0, req_rows.long(), -is_real.int())
        accept(
            logits,
            req_rows,
            descriptor.query_len,
            self._settings._replace(is_plain=self._all_plain),
            state._replace(limits=runner.rows["asking_draft_limits"]),
            self._rates,
            runner.returned.lines,
        )
        return ()


class Drafter(Protocol):
    """Writes `drafts` of rows, from data on the device only."""

    graphs: CudaGraphRunner
    """The drafting graphs; keys are uniform batches with as many tokens per request as there are drafts."""
    tapped_layers: tuple[int, ...]
    """The target's features are taken before these layers; (): they are its last states."""

    def named_tensors(self) -> dict[str, Tensor]:
        """What the target's graphs read of it, beyond rows."""
        ...

    def join(self, requests: Sequence[Request]) -> None:
        """Write what newcomers need into their rows, before their first step; `rows.send` sends it."""
        ...

    def run(self, rows: IntArray, num_drafts: int) -> None:
        """Launch that many drafts for each of these rows. Pass the very same array while nothing changes."""
        ...

    def catch_up(self, rows: IntArray) -> None:
        """Called before a step of these rows without drafts: rows that had drafts verified in the step before
        must not miss anything of what it accepted."""
        ...

    def note_step(
        self, input_ids: Tensor, batch: AttentionBatch, features: Tensor, descriptor: BatchDescriptor
    ) -> None:
        """Captured in every step of the target, after its forward pass: keep what drafts will need of it.

        `features` [T, F]: the last states, or what was tapped. In a step that verifies drafts this runs
        before acceptance: `batch` has the lengths with all tokens, and `lengths` of its rows are still the
        old ones.
        """
        ...

    def try_out(self) -> None:
        """Run everything that has its own kernels once, without a trace."""
        ...


def why_single(params: SamplingParams, *, is_processed: bool, follows_tokens: bool) -> str | None:
    """Why a request cannot have its drafts verified: its next token depends on the previous one in a way that
    only the host knows, or its answer contains more than tokens; None: it can.

    `is_processed`: functions change its logits; `follows_tokens`: the allowed tokens depend on earlier ones.
    """
    asked = {
        "structured output": params.structured_outputs is not None,
        "logits processors": is_processed,
        "penalties": params.has_penalties,
        "logprobs": params.wants_logprobs,
        "bad_words of several tokens": follows_tokens,
    }
    return next((name for name, is_asked in asked.items() if is_asked), None)


def make_speculation(runner: Target) -> Speculation | None:
    """Speculation on the rows of a runner; None if it is not configured."""
    config = runner.config.speculation
    if config is None:
        return None
    if config.method == "ngram":
        return Speculation(runner, config, NgramDrafter(runner, config))
    assert runner.draft is not None
    return Speculation(runner, config, EagleGraphManager(runner, config, runner.draft))
