"""Runs model steps: each through `CudaGraphRunner`, from a graph or eagerly with a reason."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from ostinato.cache.kv import KVCache
from ostinato.graphs import (
    BatchDescriptor,
    BatchShape,
    Capability,
    CapturedGraph,
    CaptureOptions,
    CudaGraphRunner,
    Dispatcher,
    GraphKey,
    GraphMode,
    GraphPool,
    InputBuffers,
    Reason,
    Report,
    Results,
)
from ostinato.graphs.capturing.pool import Memory
from ostinato.graphs.dispatching.descriptor import recurring_shape
from ostinato.kernels.attention.backend import AttentionBackend
from ostinato.kernels.attention.batch import AttentionBatch, HostLengths
from ostinato.kernels.decode_inputs import request_rows
from ostinato.kernels.speculation.verification import verified_line
from ostinato.models.adapters.stacks import AdapterStacks
from ostinato.models.last_tokens import LastTokens
from ostinato.models.taps import Taps
from ostinato.models.transformer import Transformer

from ..resolved_config import ResolvedConfig
from ..scheduling.request import IntArray, Request
from ..scheduling.scheduled_step import PageUpdate, ScheduledStep
from ..speculating.fields import VERIFYING, drafting_fields
from ..speculating.speculation import make_speculation
from ..speculating.target import Bunch, DraftParts
from . import shared_prefix
from .device_rows import DeviceRows, row_fields
from .layer_attention import LayerAttention
from .planned_graphs import LAST_TOKENS, PlannedGraphs, has_whole_contexts
from .step_inputs import ON_DEVICE, host_lengths, inputs_of, max_context, step_fields
from .times import StartupTimes
from .token_return import PlainSampling, TokenReturn


class _Held(NamedTuple):
    """What the inputs of the last decode step were made from, and the shape that served it."""

    rows: IntArray | None
    shared_prefix: int
    num_drafts: int
    shape: BatchShape

    def is_for(self, step: ScheduledStep) -> bool:
        """Whether the step needs no new inputs."""
        of_step = step.shared_prefix, step.num_drafts
        return step.rows is self.rows and of_step == (self.shared_prefix, self.num_drafts)


_FEW = 4
"""Up to this many changes of the page table are written one by one: they are long ones, of prompts."""
_NOTHING = _Held(None, 0, 0, BatchShape.decode(1))


class ModelRunner:
    """A model, its KV cache, the rows of its requests and its graphs.

    Static buffers hold what outlives a replay: in `logits` the logits of each request's last token, which
    sampling reads; in `hidden` the hidden states of a mixed step's tokens, for prompt logprobs and embeddings
    (graphs for steps without these leave none, see `PlannedGraphs`); in `last_tokens` the token sampled last
    in each row, where the next step finds it; in `began` the time at which the last decode step began. Decode
    steps end with plain sampling.
    """

    def __init__(
        self,
        model: Transformer,
        kv: KVCache,
        attention: AttentionBackend,
        config: ResolvedConfig,
        memory: Memory | None = None,
        adapters: AdapterStacks | None = None,
        draft: DraftParts | None = None,
    ) -> None:
        """`memory`: where graphs allocate, if not from torch. `adapters`: those of requests. `draft`: the
        draft model, if there is one."""
        self.model = model
        self.adapters = adapters
        self.kv = kv
        self.config = config
        self.draft = draft
        self.attention = attention
        self._held = _NOTHING
        device = config.device
        budget = config.config.cuda_graph_memory_mb
        self.pool = GraphPool(device, budget=budget * 2**20 if budget else None, memory=memory)
        self.rows = DeviceRows(
            (
                *row_fields(config.page_columns, has_adapters=adapters is not None),
                *drafting_fields(config),
            ),
            config.max_rows,
            self.pool,
            GraphMode.FULL_DECODE_ONLY if self._has_graphs and device.type == "cuda" else GraphMode.NONE,
            config.warmups,
        )
        self.page_table, self.lengths = self.rows["page_table"], self.rows["lengths"]
        self.last_tokens = self.rows["last_tokens"]
        shape = model.config
        vocab = shape.vocab_size if shape.has_lm_head else 0
        running, tokens = config.max_running_requests, config.max_step_tokens
        verified = 0 if config.speculation is None else config.verify_ladder.limit
        num_lines = max(running, verified * (1 + config.max_drafts))
        self.logits = torch.zeros(num_lines, vocab, dtype=torch.float32, device=device)
        self.hidden = torch.zeros(tokens, shape.hidden_size, dtype=config.dtype, device=device)
        self.began = torch.zeros(1, dtype=torch.int64, device=device)
        self.missed_cascades: Counter[Reason] = Counter()
        """Steps whose attention should have read a shared prefix once, but had no graph for it."""
        self._why_no_cascade: Reason | None = None
        self.kv_bytes_per_token = sum(cache[0, 0].nbytes for cache in kv.layer(0))
        """Of one layer."""
        self.notes_beginning = False
        """Whether the last step ran from a decode graph, which records the time in `began`."""
        # One line per step, two with drafts, and as many again: a failed step may have written one, too.
        places = max(running, verified_line(verified, 1 + config.max_drafts))
        num_lines = (2 if config.speculation is None else 4) * (config.lookahead + 2)
        self.returned = TokenReturn(self.last_tokens, self.began, places, num_lines)
        self.sample_plain = PlainSampling(self.rows, self.logits, self.returned)
        self.has_sampled = False
        """Whether the last step has chosen the tokens of its plain requests."""
        self.bunch: Bunch | None = None
        """The layout of the tokens, if the last step verified drafts."""
        self.speculation = make_speculation(self)
        """Drafts tokens and verifies them; None: no speculation."""
        self._one_token_each = torch.arange(running, dtype=torch.int32, device=device)
        self._contexts = [bucket for bucket in config.context_buckets if bucket is not None]
        self._layers = LayerAttention(attention, model.config, kv)
        self.planned, self.graphs = self._make_runner()

    @property
    def _has_graphs(self) -> bool:
        return self.config.graph_mode is not GraphMode.NONE

    def _make_runner(self) -> tuple[PlannedGraphs, CudaGraphRunner]:
        config = self.config
        asked = config.config
        capability = Capability[self.attention.capability]
        dispatcher = Dispatcher(
            config.graph_mode, capability=capability, padding=not asked.disable_cuda_graph_padding
        )
        of_drafts = None if self.speculation is None else self.speculation.verify_keys(dispatcher.mode)
        planned = PlannedGraphs(self.model, self.attention, config, dispatcher.mode, of_drafts)
        runner = CudaGraphRunner(
            self.step,
            InputBuffers(
                step_fields(self.model.config.vocab_size, config.max_model_len),
                max_tokens=config.max_step_tokens,
                max_reqs=config.max_running_requests,
                device=config.device,
                allocate=self.pool.allocate,
            ),
            planned.keys,
            dispatcher=dispatcher,
            pool=self.pool,
            options=CaptureOptions(
                warmups=config.warmups,
                freeze_gc=not asked.enable_cudagraph_gc,
                debug_log=asked.cuda_graph_debug_log,
            ),
            # Padding writes page 0 only, and the logits are unused between steps.
            state=self.returned.state,
            dummy=self._dummy,
            kernels_of=planned.warmed_with,
            results=Results.UNGUARDED,
        )
        runner.watch(self.model)
        if self.draft is not None:
            runner.watch({f"draft.{name}": each for name, each in self.draft.model.named_parameters()})
        static = {"page_table": self.page_table, "prefix_lens": self.rows["prefix_lens"]}
        static |= {"lengths": self.lengths, "last_tokens": self.last_tokens}
        static |= {"began": self.began, **self.returned.state}
        if self.adapters is not None:
            static |= {"adapter_slots": self.rows["adapter_slots"], **self.adapters.named_tensors()}
        if self.speculation is not None:
            static |= self.speculation.named_tensors()
        runner.watch({**static, "logits": self.logits, "hidden": self.hidden, **self.kv.named_tensors()})
        return planned, runner

    def capture(
        self, times: StartupTimes, *, keys: Sequence[GraphKey] | None = None, progress: bool | None = None
    ) -> Report:
        """Capture all graphs, or those of these keys; weights and KV cache must be in place."""
        self.rows.capture()
        self._layers.prepare()
        report = self.graphs.capture(keys, progress=progress)
        for graph in self.graphs.graphs.values():
            times.add("capture decode" if graph.descriptor.is_uniform else "capture prefill", graph.seconds)
        if self.speculation is not None:
            with times.phase("capture drafts"):
                self.speculation.capture(some=keys is not None)
        return report

    def update_pages(self, updates: Sequence[PageUpdate]) -> None:
        """Write changes into the page table; `rows.send` copies them to the device."""
        if len(updates) <= _FEW:
            for update in updates:
                self.rows.write_span("page_table", *update)
        else:
            rows, firsts, pages = zip(*updates, strict=True)
            lengths = np.array([len(each) for each in pages])
            columns = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths - firsts, lengths)
            self.rows.write_cells("page_table", np.repeat(rows, lengths), columns, np.concatenate(pages))

    def join(self, requests: Sequence[Request]) -> None:
        """Write the adapters of newcomers, and what drafts need; `rows.send` copies it to the device."""
        if self.speculation is not None:
            self.speculation.drafter.join(requests)
        if self.adapters is not None:
            for request in requests:
                self.rows.write("adapter_slots", request.row, request.adapter_slot)

    def update_prefix(self, step: ScheduledStep) -> None:
        """Write the prefix that the step's requests share, if a cascade pays; `rows.send` sends it."""
        if not self._held.is_for(step) and self._wants_cascade(step):
            self.rows.write_rows("prefix_lens", step.rows, step.shared_prefix)

    def _wants_cascade(self, step: ScheduledStep) -> bool:
        shared = step.shared_prefix
        if not shared or not has_whole_contexts(self.model.config, self.config):
            return False
        return shared_prefix.pays(step.num_requests, shared, self.kv_bytes_per_token)

    def run(self, step: ScheduledStep) -> torch.Tensor:
        """Run one step; the logits of each request's last token are valid until the next step."""
        if self.speculation is not None:
            self.speculation.draft(step)
        # While the rows stay the same, a decode graph needs no new inputs; its bucket of contexts may change.
        # If this fails midway, the contents of the inputs are unknown.
        held, self._held = self._held, _NOTHING
        is_same = held.is_for(step)
        shape = held.shape if is_same and not self._contexts else self.shape_of(step)
        if self._why_no_cascade is not None:
            self.missed_cascades[self._why_no_cascade] += 1
        if is_same and self.graphs.can_rerun(shape):
            logits = self.graphs.rerun(shape)
            self._count_line()
            self._held = held
            return logits
        decision = self.graphs.decide(shape)
        descriptor = decision.descriptor or shape.as_descriptor()
        self.notes_beginning = decision.descriptor is not None and descriptor.is_uniform
        self.has_sampled = self.samples(descriptor)
        self.bunch = Bunch(descriptor.num_reqs, step.query_len) if step.num_drafts else None
        # Only a full graph contains attention; between segments and eagerly, attention needs the real
        # lengths. The host does not know them for requests whose drafts are being verified.
        is_known = self.speculation is None or not self.config.lookahead
        if decision.mode is GraphMode.FULL:
            self._layers.lengths = None
        else:
            self._layers.lengths = host_lengths(step) if is_known else ON_DEVICE
        logits = self.graphs.run(inputs_of(step, is_drafting=self.speculation is not None), shape)
        if step.num_drafts and not self.has_sampled:
            assert self.speculation is not None
            self.bunch = self.speculation.run_tail(step)
            self.has_sampled = True
        self._count_line()
        if self.notes_beginning:
            self._held = _Held(step.rows, step.shared_prefix, step.num_drafts, shape)
        return logits

    def run_from(self, graph: CapturedGraph, step: ScheduledStep, *, poison: bool = False) -> torch.Tensor:
        """One step from exactly this graph, whichever `run` would choose; a line it writes is not counted."""
        self._layers.lengths = None if graph.key.mode is GraphMode.FULL else host_lengths(step)
        self._held = _NOTHING
        shape = BatchShape(
            step.total_tokens, step.num_requests, graph.descriptor.query_len, lora=step.num_adapters
        )
        self.graphs.buffers.fill(inputs_of(step), shape, graph.descriptor, poison=poison)
        self.graphs.launch(graph)
        return self.logits[: step.num_requests]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Rows, lines and their counts are restored at the end; the inputs then count as unknown."""
        lengths, sampled, notes = self._layers.lengths, self.has_sampled, self.notes_beginning
        counts = nullcontext() if self.speculation is None else self.speculation.unchanged()
        try:
            with self.rows.unchanged(), self.returned.unchanged(), counts:
                yield
        finally:
            self._layers.lengths, self.has_sampled, self.notes_beginning = lengths, sampled, notes
            self._held = _NOTHING
            # A sampling graph for more requests than the step before it had reads what is left here.
            self.logits.zero_()
            self.hidden.zero_()

    def samples(self, descriptor: BatchDescriptor) -> bool:
        """Whether a step of this form ends with plain sampling."""
        return descriptor.is_uniform and self.model.config.has_lm_head

    def _count_line(self) -> None:
        if self.has_sampled:
            self.returned.launched()

    def shape_of(self, step: ScheduledStep) -> BatchShape:
        """What the dispatcher decides by; contexts of one bucket count as equal, so shapes recur."""
        context = 0
        if self._contexts:
            context = self._contexts[bisect_left(self._contexts, int(step.seq_lens.max()))]
        # Results depend on shapes bit by bit, so invariance means that no step gets a shape of its own.
        is_decode = step.is_uniform_decode and not self.config.config.batch_invariant
        query_len = step.query_len if is_decode else None
        num_tokens = step.total_tokens
        of_step = num_tokens, step.num_requests, query_len, step.num_adapters, context
        shape = recurring_shape(*of_step)
        self._why_no_cascade = None
        if num_tokens > self.planned.most_with_all_states and not is_decode and not step.wants_states:
            of_last_tokens = recurring_shape(*of_step, LAST_TOKENS)
            if not self.graphs.decide(of_last_tokens).is_eager:
                return of_last_tokens
        if step.num_drafts and is_decode:
            verifying = replace(shape, extra=VERIFYING)
            if not self.graphs.decide(verifying).is_eager:
                shape = verifying
        if self._wants_cascade(step):
            cascade = replace(shape, cascade=True)
            decision = self.graphs.decide(cascade)
            if decision.mode is GraphMode.FULL:
                return cascade
            eager = decision.reason if decision.is_eager else Reason.CASCADE_ATTENTION
            self._why_no_cascade = decision.why_not_full or eager
        return shape

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
        """What is captured: token ids to logits. A negative id stands for the token sampled last in its row.

        A decode step also chooses the tokens of its plain requests.
        """
        query_len, speculation = descriptor.query_len, self.speculation
        if query_len is not None and query_len > 1:
            assert speculation is not None
            verified = speculation.begin(req_rows, query_len)
            input_ids, positions, token_rows, seq_lens, query_starts, query_lens = verified
        elif descriptor.is_uniform:
            input_ids, positions, seq_lens, query_lens = request_rows.begin_decode(
                req_rows, self.lengths, self.last_tokens, self.began
            )
            token_rows, query_starts = req_rows, self._one_token_each[: req_rows.size(0)]
        elif speculation is not None:
            input_ids, positions, seq_lens = speculation.fill_in(
                input_ids, positions, token_rows, req_rows, seq_lens, query_lens
            )
        else:
            input_ids = torch.where(input_ids < 0, self.last_tokens.index_select(0, token_rows), input_ids)
            request_rows.set_lengths(req_rows, self.lengths, seq_lens)
        batch = AttentionBatch(
            page_table=self.page_table,
            token_rows=token_rows,
            positions=positions,
            req_rows=req_rows,
            seq_lens=seq_lens,
            query_starts=query_starts,
            query_lens=query_lens,
            max_query_len=descriptor.query_len or descriptor.num_tokens,
            max_context=max_context(self.config, descriptor),
            equal_places=self.planned.has_equal_places(descriptor),
            prefix_lens=self.rows["prefix_lens"] if descriptor.cascade else None,
        )
        adapters = None
        if descriptor.lora:
            assert self.adapters is not None
            adapters = self.adapters.of_tokens(self.rows["adapter_slots"].index_select(0, token_rows))
        tapped = () if speculation is None else speculation.drafter.tapped_layers
        taps = Taps(tapped) if tapped else None
        last = self._last_tokens_of(batch, descriptor) if descriptor.extra == LAST_TOKENS else None
        hidden = self.model(input_ids, positions, self._layers.over(batch), adapters, taps, last)
        if speculation is not None:
            features = hidden if taps is None else taps.features()
            speculation.drafter.note_step(input_ids, batch, features, descriptor)
        if query_len is not None and query_len > 1:
            return self.verify(hidden, req_rows, query_len)
        if not descriptor.is_uniform and last is None:
            self.hidden[: input_ids.size(0)].copy_(hidden)
            hidden = hidden.index_select(0, batch.last_places())
        logits = self.logits[: req_rows.size(0)]
        if self.model.config.has_lm_head:
            self.model.logits(hidden, logits)
        if self.samples(descriptor):
            self.sample_plain(req_rows)
        return logits

    def _last_tokens_of(self, batch: AttentionBatch, descriptor: BatchDescriptor) -> LastTokens:
        places, adapters = batch.last_places(), None
        if descriptor.lora:
            assert self.adapters is not None
            slots = self.rows["adapter_slots"].index_select(0, batch.req_rows)
            adapters = self.adapters.of_tokens(slots)
        return LastTokens(places, self._layers.of_last_tokens(batch, places), adapters)

    def verify(self, hidden: torch.Tensor, req_rows: torch.Tensor, query_len: int) -> torch.Tensor:
        """Captured, after a forward pass over `query_len` tokens of each request: accept drafts, from the
        states [T, H]. Returns the logits of each request's first token, as in a step without drafts."""
        assert self.speculation is not None
        num_requests = req_rows.size(0)
        # All first tokens, then all second ones: sampling after this finds them where it always does.
        by_place = hidden.view(num_requests, query_len, -1).transpose(0, 1).reshape(hidden.shape)
        logits = self.logits[: hidden.size(0)]
        self.model.logits(by_place, logits)
        self.speculation.accept(logits, req_rows, query_len, self.returned.lines)
        return logits[:num_requests]

    def _dummy(self, descriptor: BatchDescriptor) -> dict[str, torch.Tensor]:
        """Padding only. Attention between segments has no request to work on."""
        eager_attention = (
            self.graphs.dispatcher.mode.mixed is GraphMode.PIECEWISE and not descriptor.is_uniform
        )
        self._layers.lengths = HostLengths([], [], []) if eager_attention else None
        views = self.graphs.buffers.views(descriptor)
        return {
            field.name: torch.full_like(views[field.name], field.pad) for field in self.graphs.buffers.fields
        }
