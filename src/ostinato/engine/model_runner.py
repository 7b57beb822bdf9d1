"""Runs model steps: every one through `CudaGraphRunner`, from a graph or eagerly with a reason."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ostinato.cache.kv import KVCache
from ostinato.graphs import (
    BatchDescriptor,
    BatchShape,
    Capability,
    CaptureOptions,
    CudaGraphRunner,
    Dispatcher,
    Field,
    GraphMode,
    GraphPool,
    InputBuffers,
    Report,
    capture_keys,
    eager_boundary,
)
from ostinato.kernels.attention.backend import AttentionBackend
from ostinato.kernels.attention.batch import AttentionBatch, HostLengths
from ostinato.models.transformer import Transformer

from .config import ResolvedConfig
from .request import IntArray
from .scheduled_step import PageUpdate, ScheduledStep

STEP_FIELDS = (
    Field("input_ids", torch.int64),
    Field("positions", torch.int64),
    Field("token_rows", torch.int32),
    Field("req_rows", torch.int32, per="request"),
    Field("seq_lens", torch.int32, per="request", pad=1),
    Field("query_starts", torch.int32, per="request"),
    Field("query_lens", torch.int32, per="request"),
)
"""Padded tokens belong to row 0, whose pages are all page 0; padded requests have no tokens."""


@dataclass(frozen=True)
class StepInputs:
    """One step's batch on the host: tokens flattened, requests in the same order."""

    input_ids: IntArray
    positions: IntArray
    token_rows: IntArray
    req_rows: IntArray
    seq_lens: IntArray
    query_starts: IntArray
    query_lens: IntArray

    @classmethod
    def of(cls, step: ScheduledStep) -> StepInputs:
        """What a scheduled step computes."""
        return cls(
            input_ids=step.input_ids,
            positions=step.positions,
            token_rows=step.token_rows,
            req_rows=step.rows,
            seq_lens=step.seq_lens,
            query_starts=step.query_starts,
            query_lens=step.num_new_tokens,
        )

    @property
    def is_uniform(self) -> bool:
        """Whether every request brings one token."""
        return len(self.input_ids) == len(self.req_rows)

    @property
    def host_lengths(self) -> HostLengths:
        """Lengths for attention that runs outside a graph."""
        return HostLengths(self.query_starts.tolist(), self.query_lens.tolist(), self.seq_lens.tolist())


class ModelRunner:
    """A model, its KV cache and its graphs.

    What outlives a replay is in static buffers: the logits of each request's last token in `logits`, which
    sampling reads, and the hidden states of all tokens in `hidden`, for prompt logprobs and embeddings. The
    token sampled last in each row is in `last_tokens`, where the next step finds it.
    """

    def __init__(
        self, model: Transformer, kv: KVCache, attention: AttentionBackend, config: ResolvedConfig
    ) -> None:
        self.model = model
        self.kv = kv
        self.config = config
        self._attention = attention
        self._host: HostLengths | None = None
        device = config.device
        rows, columns = config.max_rows, config.page_columns
        self.page_table = torch.zeros(rows, columns, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        shape = model.config
        vocab = shape.vocab_size if shape.has_lm_head else 0
        running, tokens = config.max_running_requests, config.max_step_tokens
        self.logits = torch.zeros(running, vocab, dtype=torch.float32, device=device)
        self.hidden = torch.zeros(tokens, shape.hidden_size, dtype=config.dtype, device=device)
        self._contexts = [bucket for bucket in config.context_buckets if bucket is not None]
        self._attend = eager_boundary(self._attend_layer)
        self.graphs = self._make_runner()

    def _make_runner(self) -> CudaGraphRunner:
        config = self.config
        asked = config.config
        capability = Capability[self._attention.capability]
        dispatcher = Dispatcher(
            asked.graph_mode, capability=capability, padding=not asked.disable_cuda_graph_padding
        )
        keys = capture_keys(
            dispatcher.mode,
            config.decode_ladder,
            config.token_ladder,
            max_reqs=config.max_running_requests,
            context_buckets=config.context_buckets,
        )
        budget = asked.cuda_graph_memory_mb
        runner = CudaGraphRunner(
            self.step,
            InputBuffers(
                STEP_FIELDS,
                max_tokens=config.max_step_tokens,
                max_reqs=config.max_running_requests,
                device=config.device,
            ),
            keys,
            dispatcher=dispatcher,
            pool=GraphPool(config.device, budget=budget * 2**20 if budget else None),
            options=CaptureOptions(warmups=config.warmups, freeze_gc=not asked.enable_cudagraph_gc),
            state={},  # padding writes page 0 and row 0 only, and the logits belong to nobody between steps
            dummy=self._dummy,
        )
        runner.watch(self.model)
        static = {"page_table": self.page_table, "last_tokens": self.last_tokens}
        runner.watch({**static, "logits": self.logits, "hidden": self.hidden, **self.kv.named_tensors()})
        return runner

    def capture(self, *, progress: bool | None = None) -> Report:
        """Capture all graphs; weights and KV cache must be in place."""
        return self.graphs.capture(progress=progress)

    def update_pages(self, updates: Sequence[PageUpdate]) -> None:
        """Enter changes into the page table, behind all steps launched so far."""
        if not updates:
            return
        columns = self.page_table.size(1)
        # A later update of the same place wins; index_copy_ promises no order among equal places.
        places = {
            update.row * columns + update.first + offset: page
            for update in updates
            for offset, page in enumerate(update.pages)
        }
        index = torch.from_numpy(np.fromiter(places.keys(), np.int64, len(places)))
        pages = torch.from_numpy(np.fromiter(places.values(), np.int32, len(places)))
        device = self.page_table.device
        self.page_table.view(-1).index_copy_(0, index.to(device), pages.to(device))

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """One step; the logits of each request's last token, good until the next step."""
        shape = self.shape_of(inputs)
        # Only a full graph has attention inside; between segments and eagerly it needs the real lengths.
        is_full = self.graphs.decide(shape).mode is GraphMode.FULL
        self._host = None if is_full else inputs.host_lengths
        return self.graphs.run(vars(inputs), shape)

    def shape_of(self, inputs: StepInputs) -> BatchShape:
        """What the dispatcher decides by; contexts of one bucket count as equal, so shapes recur."""
        longest = int(inputs.seq_lens.max())
        context = self._contexts[bisect_left(self._contexts, longest)] if self._contexts else 0
        query_len = 1 if inputs.is_uniform else None
        return BatchShape(len(inputs.input_ids), len(inputs.req_rows), query_len, context=context)

    def step(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        token_rows: torch.Tensor,
        req_rows: torch.Tensor,
        seq_lens: torch.Tensor,
        query_starts: torch.Tensor,
        query_lens: torch.Tensor,
        descriptor: BatchDescriptor,
    ) -> torch.Tensor:
        """What is captured: token ids to logits. A negative id is the token sampled last in its row."""
        batch = AttentionBatch(
            page_table=self.page_table,
            token_rows=token_rows,
            positions=positions,
            req_rows=req_rows,
            seq_lens=seq_lens,
            query_starts=query_starts,
            query_lens=query_lens,
            max_query_len=descriptor.query_len or descriptor.num_tokens,
            max_context=min(descriptor.context or self.config.max_model_len, self.config.page_columns * 16),
        )
        ids = torch.where(input_ids < 0, self.last_tokens.index_select(0, token_rows), input_ids)
        hidden = self.hidden[: input_ids.size(0)]
        hidden.copy_(self.model(ids, positions, functools.partial(self._attend, batch)))
        logits = self.logits[: req_rows.size(0)]
        if not self.model.config.has_lm_head:
            return logits
        last = (query_starts + query_lens - 1).clamp(min=0)
        logits.copy_(self.model.logits(hidden.index_select(0, last)))
        return logits

    def _attend_layer(
        self, batch: AttentionBatch, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        model = self.model.config
        k_cache, v_cache = self.kv.layer(layer)
        self._attention.write_kv(k, v, k_cache, v_cache, batch)
        scale, window = model.attention_scale, model.layer_windows[layer]
        if self._host is None:
            return self._attention.attend(q, k_cache, v_cache, batch, scale=scale, sliding_window=window)
        return self._attention.attend_eager(
            q, k_cache, v_cache, batch, scale=scale, sliding_window=window, lengths=self._host
        )

    def _dummy(self, descriptor: BatchDescriptor) -> dict[str, torch.Tensor]:
        """Nothing but padding. Attention between segments has no request to work on."""
        eager_attention = (
            self.graphs.dispatcher.mode.mixed is GraphMode.PIECEWISE and not descriptor.is_uniform
        )
        self._host = HostLengths([], [], []) if eager_attention else None
        views = self.graphs.buffers.views(descriptor)
        return {
            field.name: torch.full_like(views[field.name], field.pad) for field in self.graphs.buffers.fields
        }
