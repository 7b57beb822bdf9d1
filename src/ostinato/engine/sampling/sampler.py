"""Chooses the next token of each request on the device.

The parameters of a request are written once, into its row, when it gets the row (`asked_rows`). A step then
sends only rows, or nothing if they are those of the step before. Plain sampling, which is also the end of
every decode step (`plain_sampling`), serves all requests of a step that need no more. Another graph then
serves the rest, and only them (`kernels.sampling.asking_rows`): the cheapest kind that can serve them all
(`kinds`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ostinato.graphs import (
    CaptureOptions,
    CudaGraphRunner,
    Dispatcher,
    Field,
    GraphMode,
    InputBuffers,
    Ladder,
    Reason,
    Report,
    Results,
    capture_keys,
    frozen_gc,
)
from ostinato.graphs.dispatching.descriptor import recurring_shape
from ostinato.kernels.sampling import asking_rows
from ostinato.kernels.sampling.asked import Asked
from ostinato.kernels.sampling.token_lines import LogprobLines

from ..parameters.sampling_params import RequestError, SamplingParams
from ..scheduling.request import IntArray, Request
from ..scheduling.scheduled_step import ScheduledStep
from ..scheduling.token_rules import NOTHING_LEFT, SharedRules
from ..stepping.device_rows import MAX_BANNED, MAX_BIASES
from ..stepping.model_runner import ModelRunner
from ..stepping.token_return import Amendment, BesideLines, Launched
from ..stepping.whole_logprobs import MOST_IN_GRAPHS, on_the_way
from .asked_rows import AskedRows
from .kinds import Asking, Drawn, Kind
from .logits_processors import ProcessorBatch, process, what_is_wrong
from .logprobs import Change, beside, drawn_logits

PLAIN_FIELDS = (Field("req_rows", torch.int32, per="request"),)
"""Requests that sample nothing in a step have row 0, like padding: its state never changes."""


def asking_fields(max_requests: int) -> tuple[Field, ...]:
    """Padding has row 0, whose token is discarded, so its place can be any."""
    return (
        Field("rows", torch.int32, per="request"),
        Field("places", torch.int32, per="request", poison=max_requests - 1),
    )


class Sampler:
    """Sampling parameters of all rows on the device, and the graphs that use them."""

    def __init__(self, runner: ModelRunner) -> None:
        config = runner.config
        self._runner = runner
        self._rows = runner.rows
        self._vocab = vocab = runner.logits.size(1)
        tells_drawn = config.config.logprobs_mode == "processed_logprobs"
        self._asked_rows = AskedRows(runner, vocab, tells_drawn=tells_drawn)
        self.join = self._asked_rows.join
        """Write the settings of a step's newcomers into their rows; `rows.send` copies them to the device."""
        self._kinds, self._masks = self._asked_rows.kinds, self._asked_rows.masks
        self.generated = self._asked_rows.generated
        self.processors = ProcessorBatch(())
        """Callers' classes that change logits."""
        self._asked = Asked(
            generated=self.generated,
            in_prompt=self._asked_rows.in_prompt,
            masks=self._masks.tensor,
            **{name: self._rows[name] for name in Asked._fields[:-3]},
        )
        if runner.speculation is not None:
            runner.speculation.asked = self._asked
        self._returned = runner.returned
        self.logprobs = LogprobLines.of(self._returned.lines, min(MOST_IN_GRAPHS, vocab))
        """Where log-probabilities are returned."""
        asking = self._buffers_for(asking_fields(config.max_running_requests))
        buffers = {Kind.PLAIN: self._buffers_for(PLAIN_FIELDS), Kind.ADJUSTED: asking, Kind.FILTERED: asking}
        self.graphs = {kind: self._make_graphs(kind, buffers[kind]) for kind in Kind}
        """The graphs of each kind."""
        self._rules = SharedRules()
        self._decided: tuple[IntArray | None, int, Asking | None] = (None, 0, None)
        self._held: dict[Kind, object] = dict.fromkeys(Kind)
        eager_steps: Counter[Reason] = Counter()  # shared by all kinds: they report as one
        for graphs in self.graphs.values():
            graphs.eager_steps = eager_steps

    def _buffers_for(self, fields: Sequence[Field]) -> InputBuffers:
        running = self._runner.config.max_running_requests
        device, allocate = self._runner.config.device, self._runner.pool.allocate
        return InputBuffers(fields, max_tokens=running, max_reqs=running, device=device, allocate=allocate)

    def _make_graphs(self, kind: Kind, buffers: InputBuffers) -> CudaGraphRunner:
        config = self._runner.config
        running = config.max_running_requests
        asked = config.graph_mode
        mode = GraphMode.NONE if asked is GraphMode.NONE else GraphMode.FULL_DECODE_ONLY
        powers = [1 << power for power in range(running.bit_length()) if 1 << power < running]
        keys = capture_keys(mode, Ladder([*powers, running]), None, max_reqs=running)
        steps = (self._plain, self._sample_adjusted, self._sample_filtered)
        return CudaGraphRunner(
            steps[kind],
            buffers,
            keys,
            dispatcher=Dispatcher(mode),
            pool=self._runner.graphs.pool,
            options=CaptureOptions(
                warmups=config.warmups, freeze_gc=False, debug_log=config.config.cuda_graph_debug_log
            ),
            state=self._returned.state,  # padding changes nothing else: row 0 stays as it is
            kernels_of=lambda key: None,
            results=Results.UNGUARDED,
        )

    def try_out(self) -> None:
        """Run everything that has its own kernels once, without a trace."""
        for graphs in self.graphs.values():
            for key in graphs.keys[:1]:
                graphs.try_out(key)

    def capture(self, *, progress: bool | None = None) -> Report:
        """Capture the graphs of all kinds."""
        with frozen_gc(not self._runner.config.config.enable_cudagraph_gc):
            for graphs in self.graphs.values():
                graphs.capture(progress=progress)
        return self.report()

    def report(self) -> Report:
        """Graphs of all kinds and eager steps by reason."""
        return Report.joined([graphs.report() for graphs in self.graphs.values()])

    @property
    def num_bytes(self) -> int:
        """Size of the records of earlier tokens; the parameters are in the rows."""
        return self._asked_rows.num_bytes

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Requests that join inside are undone at the end, and the graphs' inputs count as unknown."""
        try:
            with self._asked_rows.unchanged():
                yield
        finally:
            self._decided, self._held = (None, 0, None), dict.fromkeys(Kind)

    def drop(self) -> None:
        """Forget all graphs."""
        for graphs in self.graphs.values():
            graphs.drop()

    # -- parameters --------------------------------------------------------------------------------

    def take(self, request: Request, params: SamplingParams) -> None:
        """Give a new request its rules. Raises RequestError for parameters that this vocabulary, these
        buffers or this configuration do not allow."""
        self._check(params, request.eos_token_ids)
        self.processors.check(params)
        request.processors = [*(params.logits_processors or ()), *self.processors.functions(params)]
        request.is_processed = bool(request.processors) or self.processors.sees_everybody
        request.rules = self._rules.of(
            params,
            request.eos_token_ids,
            self._vocab,
            has_grammar=request.grammar is not None,
            is_processed=request.is_processed,
        )

    def _check(self, params: SamplingParams, eos_token_ids: Collection[int]) -> None:
        most = self._runner.config.config.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is not None and most >= 0 and not 0 <= asked <= most:
                raise RequestError(
                    f"{name} is {asked}{' (all)' if asked < 0 else ''}, and at most {most} are allowed: "
                    "raise the engine's max_logprobs, or set it to -1 to allow all"
                )
        named = max(params.logprob_token_ids or [0])
        if named >= self._vocab:
            raise RequestError(
                f"logprob_token_ids: token {named} is outside the vocabulary, which ends at {self._vocab - 1}"
            )
        bias = params.logit_bias or {}
        if len(bias) > MAX_BIASES:
            raise RequestError(f"logit_bias has {len(bias)} tokens, and at most {MAX_BIASES} are possible")
        if bias and max(bias) >= self._vocab:
            raise RequestError(
                f"logit_bias: token {max(bias)} is outside the vocabulary, which ends at {self._vocab - 1}"
            )
        num_ends = 0 if params.ignore_eos else len(eos_token_ids)
        most_stops = MAX_BANNED - max(4, num_ends)
        if params.min_tokens and len(params.stop_token_ids or ()) > most_stops:
            raise RequestError(
                f"min_tokens can suppress at most {most_stops} stop tokens in addition to the {num_ends} "
                "end-of-text tokens of this model"
            )

    # -- steps -------------------------------------------------------------------------------------

    def mask(self, requests: Sequence[Request]) -> dict[Request, str]:
        """Restrict these requests, each with a grammar or rules, to allowed tokens; before every `launch`.

        Returns those without an allowed token, with the reason.
        """
        stuck = {}
        for request in requests:
            within = request.allowed_by_rules
            if request.grammar is not None:
                is_left = self._masks.follow(request.row, request.grammar, within)
            else:
                assert within is not None
                is_left = self._masks.allow(request.row, within)
            if not is_left:
                stuck[request] = NOTHING_LEFT
        self._masks.send()
        return stuck

    def process(self, step: ScheduledStep, places: Sequence[int]) -> dict[Request, str]:
        """Apply callers' functions and classes to the logits of the requests at these places. Returns the
        requests left without a token, with the reason."""
        at_work = {step.requests[at]: self._runner.logits[at] for at in places}
        lines = {request: line for request, line in at_work.items() if request.is_processed and request.row}
        failed = {}
        for request, logits in lines.items():
            if request.processors and (error := process(request, logits)) is not None:
                failed[request] = error
        lines = {request: line for request, line in lines.items() if request not in failed}
        if lines and self.processors.sees_everybody and (error := self.processors.apply(lines)) is not None:
            return {**failed, **dict.fromkeys(lines, error)}
        for request, logits in lines.items():
            allowed = torch.from_numpy(self._masks.allowed(request.row)).to(logits.device)
            if (error := what_is_wrong(logits, allowed)) is not None:
                failed[request] = error
        return failed

    def whole_logprobs(self, step: ScheduledStep) -> dict[int, Tensor]:
        """By place, the model's distributions of requests that want them whole, on their way to the host;
        call it before anything changes the logits."""
        places = self._kinds.wanting_whole(step, drawn=False)
        return {at: on_the_way(self._runner.logits[at]) for at in places}

    def whole_drawn_logprobs(self, step: ScheduledStep) -> dict[int, Tensor]:
        """The same for requests that want the distribution they draw from; before anything is drawn."""
        found = {}
        for at in self._kinds.wanting_whole(step, drawn=True):
            row = int(step.rows[at])
            of = torch.tensor([row], device=self.generated.device)
            change = Change(int(self._kinds.changes[row]))
            [drawn] = drawn_logits(self._runner.logits[at : at + 1], of, self._asked, change)
            found[at] = on_the_way(drawn)
        return found

    def launch(self, step: ScheduledStep) -> Launched:
        """Sample from the logits of the step just run, one row per request, unless the step has done so.

        The tokens are on their way to the host when this returns; `Launched.read` waits for them.
        """
        if not self._runner.has_sampled:
            rows = step.rows if step.is_uniform_decode else None
            self._run(Kind.PLAIN, {"req_rows": _sampling_rows(step)}, rows)
            self._returned.launched()
        asking = self._asking_in(step)
        amendment = None
        if asking is not None:
            self._run(asking.kind, {"rows": asking.rows, "places": asking.places}, asking)
            amendment = Amendment(asking.told, self.logprobs, self._beside(asking.drawn))
        launched = self._returned.newest(step.num_requests, amendment, self._runner.bunch)
        return self._with_bunches(step, launched) if step.num_drafts else launched

    def _with_bunches(self, step: ScheduledStep, launched: Launched) -> Launched:
        """Choose all tokens of requests that have drafts verified but need more than plain sampling."""
        speculation, bunch = self._runner.speculation, self._runner.bunch
        assert speculation is not None
        assert bunch is not None
        is_asking = speculation.asking_in(step)
        if is_asking.any():
            speculation.run_asking(step, is_asking, bunch)
            self._returned.launched()
            launched.amended_by(self._returned.newest(step.num_requests, bunch=bunch), is_asking)
        return launched

    def _beside(self, drawn: Drawn | None) -> BesideLines | None:
        if drawn is None:
            return None
        last_tokens, num_top = self._returned.lines.last_tokens, min(drawn.num_top, self._vocab)
        return beside(
            *(self._runner.logits, drawn.rows, drawn.places, self._asked, drawn.change, last_tokens, num_top)
        )

    def _asking_in(self, step: ScheduledStep) -> Asking | None:
        rows, num_drafts, asking = self._decided
        if step.rows is not rows or step.num_drafts != num_drafts:
            asking = self._kinds.asking(step, self._others_asking(step))
            self._decided = (step.rows if step.is_uniform_decode else None), step.num_drafts, asking
        return asking

    def _others_asking(self, step: ScheduledStep) -> IntArray | None:
        """The requests whose tokens are chosen together with their drafts."""
        if not step.num_drafts:
            return None
        assert self._runner.speculation is not None
        return self._runner.speculation.asking_in(step)

    def _run(self, kind: Kind, batch: Mapping[str, IntArray], made_of: object) -> None:
        """`made_of`: while it is the same object as in the last such step, the graph needs no new inputs."""
        count = len(next(iter(batch.values())))
        graphs, shape = self.graphs[kind], recurring_shape(count, count, 1)
        is_held = made_of is not None and made_of is self._held[kind]
        self._held[kind] = None
        if is_held and graphs.can_rerun(shape):
            graphs.rerun(shape)
        else:
            graphs.run(batch, shape)
        self._held[kind] = made_of

    def _plain(self, req_rows: Tensor) -> tuple[()]:
        self._runner.sample_plain(req_rows)
        return ()

    def _sample_adjusted(self, rows: Tensor, places: Tensor) -> tuple[()]:
        self._sample_asking(rows, places, has_filters=False)
        return ()

    def _sample_filtered(self, rows: Tensor, places: Tensor) -> tuple[()]:
        self._sample_asking(rows, places, has_filters=True)
        return ()

    def _sample_asking(self, rows: Tensor, places: Tensor, *, has_filters: bool) -> None:
        lines = self._returned.lines
        logits = self._runner.logits
        asking_rows.sample_asking(
            logits, rows, places, self._asked, lines, self.logprobs, has_filters=has_filters
        )


def _sampling_rows(step: ScheduledStep) -> IntArray:
    """The rows of a step; 0 for requests that sample nothing."""
    return step.rows if step.is_uniform_decode else np.where(step.samples, step.rows, 0).astype(np.int32)
