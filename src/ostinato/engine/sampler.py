"""Chooses the next token of each request on the device, from graphs of its own.

The parameters of a request are uploaded once, into its row, when it gets the row. A step then brings only
rows and positions. There are four kinds of graphs, each doing more than the one before; a step runs from the
cheapest kind that serves all its requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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

from .model_runner import ModelRunner
from .request import IntArray, Request
from .sampling_params import MAX_LOGPROBS, RequestError, SamplingParams

MAX_BIASES = 512
"""Tokens one request may bias."""
MAX_BANNED = 16
"""End-of-sequence and stop tokens that min_tokens can hold off."""


class Kind(IntEnum):
    """What a sampling graph can do; each one all that the smaller ones can."""

    GREEDY = 0
    RANDOM = 1
    FILTERED = 2
    """Also top-k, top-p and min-p."""
    COMPLETE = 3
    """Also penalties, biases, bans and logprobs."""

    @classmethod
    def of(cls, params: SamplingParams) -> Kind:
        """The cheapest kind that serves these parameters."""
        if params.has_penalties or params.logit_bias or params.min_tokens or params.logprobs is not None:
            return cls.COMPLETE
        if params.is_greedy:
            return cls.GREEDY
        if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
            return cls.FILTERED
        return cls.RANDOM


@dataclass(frozen=True)
class Sampled:
    """The tokens of a step, on the host."""

    tokens: IntArray
    """int64 [R]."""
    logprobs: IntArray | None = None
    """float32 [R, 1 + n]: of the sampled token, then of the n likeliest; None if nobody asked."""
    logprob_tokens: IntArray | None = None
    """int64 [R, 1 + n]: whose they are."""
    ranks: IntArray | None = None
    """int64 [R]: of the sampled tokens; 1 is the likeliest."""


class Launched:
    """A sampling step whose results are on their way to the host.

    Outputs of a replay last until the next one, so their copy is queued at once.
    """

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self._done: torch.cuda.Event | None = None
        if outputs[0].is_cuda:
            self._copies = [
                torch.empty(output.shape, dtype=output.dtype, pin_memory=True).copy_(
                    output, non_blocking=True
                )
                for output in outputs
            ]
            self._done = torch.cuda.Event()
            self._done.record()
        else:
            self._copies = [output.clone() for output in outputs]

    def read(self) -> Sampled:
        """The tokens on the host; waits for the device."""
        if self._done is not None:
            self._done.synchronize()
        if len(self._copies) == 1:
            return Sampled(self._copies[0].numpy())
        tokens, chosen, ranks, top, top_tokens = self._copies
        logprobs = torch.cat([chosen[:, None], top], 1).numpy()
        logprob_tokens = torch.cat([tokens[:, None], top_tokens], 1).numpy()
        return Sampled(tokens.numpy(), logprobs, logprob_tokens, ranks.numpy())


SAMPLING_FIELDS = (
    Field("req_rows", torch.int32, per="request"),
    Field("positions", torch.int64, per="request"),
)
"""Requests that sample nothing in a step have row 0, like padding: its state never changes."""


class Sampler:
    """Sampling parameters of all rows on the device, and the graphs that use them."""

    def __init__(self, runner: ModelRunner) -> None:
        config = runner.config
        self._runner = runner
        rows, device, vocab = config.max_rows, config.device, runner.logits.size(1)
        self._vocab = vocab
        self._kinds = np.zeros(rows, dtype=np.int8)

        def per_row(value: float, dtype: torch.dtype, *width: int) -> Tensor:
            return torch.full((rows, *width), value, dtype=dtype, device=device)

        self._settings = SamplingSettings(
            temperature=per_row(0.0, torch.float32),
            top_k=per_row(0, torch.int32),
            top_p=per_row(1.0, torch.float32),
            min_p=per_row(0.0, torch.float32),
            seeds=per_row(0, torch.int64),
        )
        self._penalties = Penalties(
            repetition=per_row(1.0, torch.float32),
            presence=per_row(0.0, torch.float32),
            frequency=per_row(0.0, torch.float32),
        )
        self._generated = per_row(0, torch.int32, vocab)
        self._in_prompt = per_row(0, torch.bool, vocab)
        self._bias_ids = per_row(0, torch.int64, MAX_BIASES)
        self._bias_values = per_row(0.0, torch.float32, MAX_BIASES)
        self._banned = per_row(-1, torch.int64, MAX_BANNED)
        self._banned_before = per_row(0, torch.int64)
        self._graphs = {kind: self._make_graphs(kind) for kind in Kind}
        eager_steps: Counter[Reason] = Counter()  # one count for all kinds: they report as one
        for graphs in self._graphs.values():
            graphs.eager_steps = eager_steps

    def _make_graphs(self, kind: Kind) -> CudaGraphRunner:
        config = self._runner.config
        running = config.max_running_requests
        asked = config.config.graph_mode
        mode = GraphMode.NONE if asked is GraphMode.NONE else GraphMode.FULL_DECODE_ONLY
        powers = [1 << power for power in range(running.bit_length()) if 1 << power < running]
        keys = capture_keys(mode, Ladder([*powers, running]), None, max_reqs=running)
        steps = (self._greedy, self._random, self._filtered, self._complete)
        return CudaGraphRunner(
            steps[kind],
            InputBuffers(SAMPLING_FIELDS, max_tokens=running, max_reqs=running, device=config.device),
            keys,
            dispatcher=Dispatcher(mode),
            pool=self._runner.graphs.pool,
            options=CaptureOptions(warmups=config.warmups, freeze_gc=False),
            state={},  # padding changes nothing: row 0 stays as it is
        )

    def capture(self, *, progress: bool | None = None) -> Report:
        """Capture the graphs of all kinds."""
        with frozen_gc(not self._runner.config.config.enable_cudagraph_gc):
            for graphs in self._graphs.values():
                graphs.capture(progress=progress)
        return self.report()

    def report(self) -> Report:
        """Graphs of all kinds and eager steps by reason."""
        return Report.joined([graphs.report() for graphs in self._graphs.values()])

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters of all rows."""
        tokens = (self._generated, self._in_prompt, self._bias_ids, self._bias_values, self._banned)
        return sum(tensor.nbytes for tensor in tokens)

    def drop(self) -> None:
        """Forget all graphs."""
        for graphs in self._graphs.values():
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
        """Upload what the newcomers of a step ask for into their rows."""
        for request in requests:
            if request.params is not None:
                self._upload(request, request.params)

    def _upload(self, request: Request, params: SamplingParams) -> None:
        row, kind = request.row, Kind.of(params)
        self._kinds[row] = kind
        settings = self._settings
        settings.temperature[row] = 0.0 if params.is_greedy else params.temperature
        settings.top_k[row] = min(max(params.top_k, 0), self._vocab)
        settings.top_p[row] = params.top_p
        settings.min_p[row] = params.min_p
        settings.seeds[row] = params.seed or 0
        # A row of a simpler kind may run in a COMPLETE step, so these are always set.
        penalties = self._penalties
        penalties.repetition[row] = params.repetition_penalty
        penalties.presence[row] = params.presence_penalty
        penalties.frequency[row] = params.frequency_penalty
        self._bias_values[row] = 0.0
        self._banned[row] = -1
        if kind is Kind.COMPLETE:
            self._upload_tokens(request, params)

    def _upload_tokens(self, request: Request, params: SamplingParams) -> None:
        row, device = request.row, self._generated.device
        if params.has_penalties:
            self._generated[row] = 0
            self._in_prompt[row] = False
            prompt = torch.tensor(request.prompt_ids, device=device)
            self._in_prompt[row].index_fill_(0, prompt, True)
            output = torch.tensor(request.output_ids, dtype=torch.int64, device=device)
            self._generated[row].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        if bias := params.logit_bias:
            self._bias_ids[row, : len(bias)] = torch.tensor(list(bias), device=device)
            self._bias_values[row, : len(bias)] = torch.tensor(list(bias.values()), device=device)
        if params.min_tokens:
            eos = () if params.ignore_eos else tuple(request.eos_token_ids)
            banned = [token for token in {*eos, *(params.stop_token_ids or ())} if token < self._vocab]
            self._banned[row, : len(banned)] = torch.tensor(
                banned[:MAX_BANNED], dtype=torch.int64, device=device
            )
            self._banned_before[row] = request.num_prompt_tokens + params.min_tokens

    # -- steps -------------------------------------------------------------------------------------

    def launch(self, rows: IntArray, positions: IntArray, samples: IntArray) -> Launched:
        """Sample from the runner's logits, one row per request; `positions` are those of the new tokens.

        The copy to the host is under way when this returns; `Launched.read` waits for it.
        """
        live = np.where(samples, rows, 0).astype(np.int32)
        kind = Kind(int(self._kinds[live].max()))
        output = self._graphs[kind].run(
            {"req_rows": live, "positions": positions}, BatchShape.decode(len(rows))
        )
        return Launched(output if kind is Kind.COMPLETE else (output,))

    def _greedy(self, req_rows: Tensor, positions: Tensor) -> Tensor:
        return self._keep(req_rows, sampling.greedy(self._logits(req_rows)))

    def _random(self, req_rows: Tensor, positions: Tensor) -> Tensor:
        settings = self._settings_of(req_rows)
        return self._keep(
            req_rows, sampling.sample(self._logits(req_rows), settings, positions, filtered=False)
        )

    def _filtered(self, req_rows: Tensor, positions: Tensor) -> Tensor:
        settings = self._settings_of(req_rows)
        return self._keep(req_rows, sampling.sample(self._logits(req_rows), settings, positions))

    def _complete(self, req_rows: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        def of_rows(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, req_rows)

        raw = self._logits(req_rows)
        logits = sampling.add_bias(raw, of_rows(self._bias_ids), of_rows(self._bias_values))
        banned = of_rows(self._banned)
        is_banned = (banned >= 0) & (positions < of_rows(self._banned_before)).unsqueeze(1)
        logits = sampling.add_bias(logits, banned.clamp(min=0), torch.where(is_banned, float("-inf"), 0.0))
        penalties = Penalties(
            repetition=of_rows(self._penalties.repetition),
            presence=of_rows(self._penalties.presence),
            frequency=of_rows(self._penalties.frequency),
        )
        logits = sampling.apply_penalties(
            logits, penalties, of_rows(self._generated), of_rows(self._in_prompt)
        )
        tokens = sampling.sample(logits, self._settings_of(req_rows), positions)
        sampling.count_tokens(self._generated, req_rows, tokens)
        found = sampling.token_logprobs(raw, tokens, min(MAX_LOGPROBS, self._vocab))
        return self._keep(req_rows, tokens), found.chosen, found.rank, found.top, found.top_tokens

    def _logits(self, req_rows: Tensor) -> Tensor:
        return self._runner.logits[: req_rows.size(0)]

    def _settings_of(self, req_rows: Tensor) -> SamplingSettings:
        every = self._settings
        return SamplingSettings(
            temperature=every.temperature.index_select(0, req_rows),
            top_k=every.top_k.index_select(0, req_rows),
            top_p=every.top_p.index_select(0, req_rows),
            min_p=every.min_p.index_select(0, req_rows),
            seeds=every.seeds.index_select(0, req_rows),
        )

    def _keep(self, req_rows: Tensor, tokens: Tensor) -> Tensor:
        """Leave the tokens where the next step of their rows finds them; row 0 holds 0 for ever."""
        self._runner.last_tokens.index_copy_(0, req_rows.long(), tokens * (req_rows != 0))
        return tokens
