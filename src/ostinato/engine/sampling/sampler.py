"""Chooses the next token of each request on the device.

The parameters of a request are written once, into its row, when it gets the row. A step then brings only
rows, and nothing if they are those of the step before. There are three kinds of sampling, each doing more
than the one before, and a step takes the cheapest kind that serves all its requests. Each kind has graphs of
its own; the plain one is also the end of every decode step (`plain_sampling`), which then needs no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from ostinato.graphs import (
    BatchShape,
    CaptureOptions,
    CudaGraphRunner,
    Dispatcher,
    Field,
    GraphMode,
    InputBuffers,
    Ladder,
    Reason,
    Report,
    capture_keys,
    frozen_gc,
)
from ostinato.kernels import sampling
from ostinato.kernels.sampling import Penalties, SamplingSettings

from ..sampling_params import MAX_LOGPROBS, RequestError, SamplingParams
from ..scheduling.request import IntArray, Request
from ..scheduling.scheduled_step import ScheduledStep
from ..stepping.model_runner import ModelRunner
from ..stepping.row_fields import MAX_BANNED, MAX_BIASES
from ..stepping.token_return import Launched
from .token_masks import TokenMasks

PIECE_BYTES = 24 << 20
"""What an intermediate over the vocabulary may take: sorting all rows of a large batch at once takes GBs."""


class Kind(IntEnum):
    """What a sampling graph can do; each one all that the smaller ones can."""

    PLAIN = 0
    """Greedy, or random with a temperature and a seed."""
    FILTERED = 1
    """Also top-k, top-p and min-p."""
    COMPLETE = 2
    """Also penalties, biases, bans, grammars and logprobs."""

    @classmethod
    def of(cls, params: SamplingParams) -> Kind:
        """The cheapest kind that serves these parameters."""
        if params.has_penalties or params.logit_bias or params.min_tokens or params.logprobs is not None:
            return cls.COMPLETE
        if params.structured_outputs is not None:
            return cls.COMPLETE
        if not params.is_greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0):
            return cls.FILTERED
        return cls.PLAIN


SAMPLING_FIELDS = (Field("req_rows", torch.int32, per="request"),)
"""Requests that sample nothing in a step have row 0, like padding: its state never changes."""


class Sampler:
    """Sampling parameters of all rows on the device, and the graphs that use them."""

    def __init__(self, runner: ModelRunner) -> None:
        config = runner.config
        self._runner = runner
        self._rows = runner.rows
        num_rows, device, vocab = config.max_rows, config.device, runner.logits.size(1)
        running = config.max_running_requests
        self._vocab = vocab
        self._kinds = np.zeros(num_rows, dtype=np.int8)
        self.generated = torch.zeros(num_rows, vocab, dtype=torch.int32, device=device)
        """How often each row generated each token, of rows that ask for penalties."""
        self._in_prompt = torch.zeros(num_rows, vocab, dtype=torch.bool, device=device)
        self._masks = TokenMasks(num_rows, vocab, device)
        self._biased_rows: set[int] = set()
        self._buffers = InputBuffers(
            SAMPLING_FIELDS,
            max_tokens=running,
            max_reqs=running,
            device=device,
            allocate=runner.pool.allocate,
        )
        self._settings = SamplingSettings(
            **{field.name: self._rows[field.name] for field in fields(SamplingSettings)}
        )
        self._returned = runner.returned
        self.graphs = {kind: self._make_graphs(kind) for kind in Kind}
        """The graphs of each kind."""
        self._decided: tuple[IntArray | None, Kind] = (None, Kind.PLAIN)
        self._held: IntArray | None = None
        eager_steps: Counter[Reason] = Counter()  # one count for all kinds: they report as one
        for graphs in self.graphs.values():
            graphs.eager_steps = eager_steps

    def _make_graphs(self, kind: Kind) -> CudaGraphRunner:
        config = self._runner.config
        running = config.max_running_requests
        asked = config.graph_mode
        mode = GraphMode.NONE if asked is GraphMode.NONE else GraphMode.FULL_DECODE_ONLY
        powers = [1 << power for power in range(running.bit_length()) if 1 << power < running]
        keys = capture_keys(mode, Ladder([*powers, running]), None, max_reqs=running)
        steps = (self._plain, self._filtered, self._complete)
        return CudaGraphRunner(
            steps[kind],
            self._buffers,
            keys,
            dispatcher=Dispatcher(mode),
            pool=self._runner.graphs.pool,
            options=CaptureOptions(
                warmups=config.warmups, freeze_gc=False, debug_log=config.config.cuda_graph_debug_log
            ),
            state=self._returned.state,  # padding changes nothing else: row 0 stays as it is
            kernels_of=lambda key: None,
        )

    def try_out(self) -> None:
        """Run what has kernels of its own once, without a trace."""
        for kind in (Kind.PLAIN, Kind.FILTERED):
            for key in self.graphs[kind].keys[:1]:
                self.graphs[kind].try_out(key)

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
        """Bytes of what the rows' tokens were so far; the parameters are in the rows."""
        return self.generated.nbytes + self._in_prompt.nbytes + self._masks.num_bytes

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Whoever joins inside is gone at the end, and the graphs' inputs are held by nobody."""
        tensors = (self.generated, self._in_prompt)
        before, kinds = [tensor.clone() for tensor in tensors], self._kinds.copy()
        biased = set(self._biased_rows)
        try:
            with self._masks.unchanged():
                yield
        finally:
            for tensor, content in zip(tensors, before, strict=True):
                tensor.copy_(content)
            self._kinds[:] = kinds
            self._biased_rows = biased
            self._decided, self._held = (None, Kind.PLAIN), None

    def drop(self) -> None:
        """Forget all graphs."""
        for graphs in self.graphs.values():
            graphs.drop()

    # -- parameters --------------------------------------------------------------------------------

    def check(self, params: SamplingParams) -> None:
        """RequestError for parameters that this vocabulary or these buffers do not allow."""
        bias = params.logit_bias or {}
        if len(bias) > MAX_BIASES:
            raise RequestError(f"logit_bias names {len(bias)} tokens, {MAX_BIASES} are possible")
        if bias and max(bias) >= self._vocab:
            raise RequestError(f"logit_bias of token {max(bias)}: the vocabulary ends at {self._vocab - 1}")
        if params.min_tokens and len(params.stop_token_ids or ()) > MAX_BANNED - 4:
            raise RequestError(f"min_tokens can hold off at most {MAX_BANNED - 4} stop tokens")

    def join(self, requests: Sequence[Request]) -> None:
        """Write what the newcomers of a step ask for into their rows; `rows.send` brings it to the device."""
        for request in requests:
            if request.params is not None:
                self._write(request, request.params)

    def _write(self, request: Request, params: SamplingParams) -> None:
        row, write = request.row, self._rows.write
        kind = self._kinds[row] = Kind.of(params)
        write("is_plain", row, kind is Kind.PLAIN)
        write("temperature", row, 0.0 if params.is_greedy else params.temperature)
        write("top_k", row, min(max(params.top_k, 0), self._vocab))
        write("top_p", row, params.top_p)
        write("min_p", row, params.min_p)
        write("seeds", row, params.seed or 0)
        # A row of a simpler kind may run in a COMPLETE step, so these are always set.
        write("repetition", row, params.repetition_penalty)
        write("presence", row, params.presence_penalty)
        write("frequency", row, params.frequency_penalty)
        self._write_biases(row, params.logit_bias or {})
        banned = self._banned(request, params)
        write("banned", row, [*banned, *[-1] * (MAX_BANNED - len(banned))])
        write("banned_before", row, request.num_prompt_tokens + params.min_tokens)
        if params.has_penalties:
            self._count_tokens_of(request)
        if request.grammar is None:
            self._masks.allow_all(row)

    def _write_biases(self, row: int, biases: Mapping[int, float]) -> None:
        if not biases and row not in self._biased_rows:
            return
        self._biased_rows.add(row)  # whatever of this fails, the next tenant writes it again
        rest = MAX_BIASES - len(biases)
        self._rows.write("bias_ids", row, [*biases, *[0] * rest])
        self._rows.write("bias_values", row, [*biases.values(), *[0.0] * rest])
        if not biases:
            self._biased_rows.remove(row)

    def _banned(self, request: Request, params: SamplingParams) -> list[int]:
        if not params.min_tokens:
            return []
        eos = () if params.ignore_eos else tuple(request.eos_token_ids)
        ids = {*eos, *(params.stop_token_ids or ())}
        return [token for token in ids if token < self._vocab][:MAX_BANNED]

    def _count_tokens_of(self, request: Request) -> None:
        row, device = request.row, self.generated.device
        self.generated[row] = 0
        self._in_prompt[row] = False
        prompt = torch.tensor(request.prompt_ids, device=device)
        self._in_prompt[row].index_fill_(0, prompt, True)
        output = torch.tensor(request.output_ids, dtype=torch.int64, device=device)
        self.generated[row].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    # -- steps -------------------------------------------------------------------------------------

    def mask(self, requests: Sequence[Request]) -> None:
        """Allow these requests, each under a grammar, only what may follow; before every `launch`."""
        for request in requests:
            assert request.grammar is not None
            self._masks.follow(request.row, request.grammar)
        self._masks.send()

    def launch(self, step: ScheduledStep) -> Launched:
        """Sample from the logits of the step just run, one row per request, unless that has been done.

        The tokens are on their way to the host when this returns; `Launched.read` waits for them.
        """
        kind = self._kind_of(step)
        if kind is Kind.PLAIN and self._runner.has_sampled:
            return self._returned.newest(step.num_requests)
        extra = self._run(self.graphs[kind], step)
        self._returned.launched()
        return self._returned.newest(step.num_requests, extra)

    def _kind_of(self, step: ScheduledStep) -> Kind:
        rows, kind = self._decided
        if step.rows is not rows:
            kind = Kind(int(self._kinds[_sampling_rows(step)].max()))
            self._decided = (step.rows if step.is_uniform_decode else None), kind
        return kind

    def _run(self, graphs: CudaGraphRunner, step: ScheduledStep) -> tuple[Tensor, ...]:
        shape = BatchShape.decode(step.num_requests)
        if step.rows is self._held and graphs.can_rerun(shape):
            extra: tuple[Tensor, ...] = graphs.rerun(shape)
            return extra
        self._held = None
        extra = graphs.run({"req_rows": _sampling_rows(step)}, shape)
        if step.is_uniform_decode:
            self._held = step.rows
        return extra

    def _plain(self, req_rows: Tensor) -> tuple[Tensor, ...]:
        self._runner.sample_plain(req_rows)
        return ()

    def _filtered(self, req_rows: Tensor) -> tuple[Tensor, ...]:
        def draw(rows: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
            return (self._draw(rows, logits),)

        if req_rows.is_cuda:  # nothing is sorted there
            tokens = self._draw(req_rows, self._logits(req_rows))
        else:
            [tokens] = self._in_pieces(draw, req_rows)
        self._returned.keep(req_rows, tokens)
        return ()

    def _complete(self, req_rows: Tensor) -> tuple[Tensor, ...]:
        tokens, *logprobs = self._in_pieces(self._complete_piece, req_rows)
        sampling.count_tokens(self.generated, req_rows, tokens)
        self._returned.keep(req_rows, tokens)
        return tuple(logprobs)

    def _complete_piece(self, rows: Tensor, raw: Tensor) -> tuple[Tensor, ...]:
        def of_rows(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, rows)

        state = self._rows
        logits = sampling.add_bias(raw, of_rows(state["bias_ids"]).long(), of_rows(state["bias_values"]))
        banned = of_rows(state["banned"]).long()
        # Lengths say where the new tokens will stand: behind all that the forward pass has just computed.
        is_early = of_rows(state["lengths"]) < of_rows(state["banned_before"])
        is_banned = (banned >= 0) & is_early.unsqueeze(1)
        logits = sampling.add_bias(logits, banned.clamp(min=0), torch.where(is_banned, float("-inf"), 0.0))
        penalties = Penalties(
            repetition=of_rows(state["repetition"]),
            presence=of_rows(state["presence"]),
            frequency=of_rows(state["frequency"]),
        )
        logits = sampling.apply_penalties(
            logits, penalties, of_rows(self.generated), of_rows(self._in_prompt)
        )
        logits = sampling.allow(logits, of_rows(self._masks.tensor))
        tokens = self._draw(rows, logits)
        found = sampling.token_logprobs(raw, tokens, min(MAX_LOGPROBS, self._vocab))
        return tokens, found.chosen, found.rank, found.top, found.top_tokens

    def _in_pieces(
        self, sample: Callable[[Tensor, Tensor], tuple[Tensor, ...]], req_rows: Tensor
    ) -> tuple[Tensor, ...]:
        """`sample(rows, their logits)` over a few rows at a time: every row is on its own."""
        size = max(1, PIECE_BYTES // (8 * self._vocab))
        pieces = [
            sample(rows, logits)
            for rows, logits in zip(req_rows.split(size), self._logits(req_rows).split(size), strict=True)
        ]
        if len(pieces) == 1:
            return pieces[0]
        return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))

    def _logits(self, req_rows: Tensor) -> Tensor:
        return self._runner.logits[: req_rows.size(0)]

    def _draw(self, rows: Tensor, logits: Tensor) -> Tensor:
        return sampling.sample(logits, rows, self._settings, self._rows["lengths"])


def _sampling_rows(step: ScheduledStep) -> IntArray:
    """The rows of a step; 0 for requests that sample nothing."""
    return step.rows if step.is_uniform_decode else np.where(step.samples, step.rows, 0).astype(np.int32)
