"""Drafts by a model: the chain of all drafts of a step is one graph per number of requests and drafts.

The first pass of a chain computes what the target's last step produced: the accepted tokens, with the
target's own features. Each further pass computes the draft before it. After prompts and steps without drafts,
the draft's keys and values are written in the same step of the target. When a step without drafts follows one
that verified some, a chain of a single draft, which is never read, computes what was accepted.

A head pairs the token at position p with the target's feature of position p - 1, in slot p - 1 of pages
numbered like the target's. For each row, features of consecutive positions are kept, starting at `base`:
those of the last step's tokens. How a chain uses them is in `kernels.speculation.chains`. Shapes are fixed,
and nothing is read back.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ostinato.cache.kv import KVCache
from ostinato.graphs import BatchDescriptor, CudaGraphRunner, GraphKey
from ostinato.kernels.attention.backend import AttentionBackend
from ostinato.kernels.attention.batch import PAGE_SIZE, AttentionBatch, HeadPreparation
from ostinato.kernels.cuda.compiled import is_compiling_only
from ostinato.kernels.decode_inputs.request_rows import note_time
from ostinato.kernels.speculation.chains import chain_next, chain_start, note_best
from ostinato.models.config import ModelConfig
from ostinato.models.drafts.draft import DraftStates
from ostinato.models.mixing import Attend, StepAttention

from ..scheduling.request import IntArray, Request
from .config import SpeculativeConfig, draft_tiers
from .row_graphs import HeldRows, row_graphs
from .target import DraftParts, Target


class EagleGraphManager:
    """Drafts from graphs, by heads on the target's features or by whole models."""

    def __init__(self, runner: Target, config: SpeculativeConfig, parts: DraftParts) -> None:
        self._config = config
        self._runner = runner
        self._rows = runner.rows
        self._draft = parts.model
        self._kv = parts.kv
        self._attention = DraftAttention(runner.attention, parts.model.shape, parts.kv)
        self.tapped_layers = parts.model.tapped_layers
        self._offset = parts.model.slot_offset
        most = config.num_speculative_tokens
        # What a whole model computed of accepted drafts stays valid; it only lacks the last of them.
        self._width = 1 + most if parts.model.feature_size else 2
        self._base = runner.rows["feature_base"]
        resolved = runner.config
        hidden = parts.model.shape.hidden_size if parts.model.feature_size else 0
        self._features = torch.zeros(
            resolved.max_rows, 1 + most, hidden, dtype=resolved.dtype, device=resolved.device
        )
        self._one_each = torch.arange(resolved.verify_ladder.limit, dtype=torch.int32, device=resolved.device)
        self._max_context = min(resolved.max_positions, resolved.page_columns * PAGE_SIZE)
        self._most_rows = resolved.verify_ladder.limit
        self._lags = np.zeros(resolved.max_rows, dtype=bool)
        """Rows whose last step verified drafts: what it accepted is computed by the next chain."""
        self.graphs = self._make_graphs(runner)
        self._held = HeldRows(self.graphs)

    def _make_graphs(self, runner: Target) -> CudaGraphRunner:
        # Padding writes to page 0 and row 0.
        graphs = row_graphs(
            runner,
            self._chain,
            sorted({1, *draft_tiers(self._config)}),
            most=runner.config.max_drafts,
            kernels_of=_kernels_of,
        )
        graphs.watch(self._draft)
        graphs.watch({**self.named_tensors(), "page_table": runner.page_table})
        return graphs

    def named_tensors(self) -> dict[str, Tensor]:
        """What graphs read, beyond weights and rows."""
        return {"features": self._features, **self._kv.named_tensors()}

    def join(self, requests: Sequence[Request]) -> None:
        """A newcomer has no features of tokens before its first step."""
        for request in requests:
            self._rows.write("feature_base", request.row, NO_FEATURE)
            self._lags[request.row] = False

    def run(self, rows: IntArray, num_drafts: int) -> None:
        """Launch that many drafts for each of these rows."""
        self._held.run(rows, num_drafts)
        self._lags[rows] = True

    def catch_up(self, rows: IntArray) -> None:
        """Compute what the last step of these rows accepted, if it verified drafts."""
        behind = rows[self._lags[rows]]
        # A single draft: a further pass would write past the last token, where a row may have no page.
        for first in range(0, len(behind), self._most_rows):
            self._held.run(behind[first : first + self._most_rows], 1)
        self._lags[rows] = False

    def note_step(
        self, input_ids: Tensor, batch: AttentionBatch, features: Tensor, descriptor: BatchDescriptor
    ) -> None:
        """Store keys and values of a step's tokens, and keep the features needed next."""
        draft, lengths = self._draft, self._rows["lengths"]
        combined = draft.combined(features) if draft.feature_size else None
        if descriptor.query_len is None or descriptor.query_len == 1:
            if combined is None:
                draft.remember(input_ids, None, batch.positions, self._attention.storing(batch))
            else:
                shifted, pairs = pairs_of_step(batch, combined, self._features, self._base)
                draft.remember(input_ids, shifted, pairs.positions, self._attention.storing(pairs))
        keep_features(batch, combined, lengths, self._features, self._base)

    def try_out(self) -> None:
        """Run the kernels of every chain once, without a trace."""
        done = set()
        for key in self.graphs.keys:
            if (kernels := _kernels_of(key)) not in done:
                done.add(kernels)
                self.graphs.try_out(key)

    def _chain(self, req_rows: Tensor, descriptor: BatchDescriptor) -> tuple[()]:
        """Captured: all drafts of a step; the step begins here."""
        assert descriptor.query_len is not None
        note_time(self._runner.began)
        states = self._catch_up(req_rows)
        for number in range(descriptor.query_len):
            tokens = note_best(
                self._draft.logits(states.hidden),
                req_rows,
                number,
                self._rows["drafts"],
                self._draft.target_offsets,
            )
            if is_compiling_only():  # the kernel did not run, and tokens are used as indices
                tokens = torch.zeros_like(tokens)
            if number + 1 < descriptor.query_len:
                states = self._go_on(req_rows, tokens, states.carried, number + 1)
        return ()

    def _catch_up(self, req_rows: Tensor) -> DraftStates:
        """The first pass, up to the last token of each row; returns its states."""
        rows, draft = self._rows, self._draft
        texts = (rows["lengths"], rows["last_tokens"], rows["drafts"], self._base)
        start = chain_start(req_rows, self._width, self._offset, *texts, self._features.size(1))
        batch = AttentionBatch(
            page_table=self._runner.page_table,
            token_rows=start.token_rows,
            positions=start.positions,
            req_rows=req_rows,
            seq_lens=start.seq_lens,
            query_starts=start.query_starts,
            query_lens=start.query_lens,
            max_query_len=self._width,
            max_context=self._max_context,
            equal_places=True,
        )
        features = (
            self._features.flatten(0, 1).index_select(0, start.features) if draft.feature_size else None
        )
        found = draft(start.input_ids, features, start.positions, self._attention.over(batch))
        carried = None if found.carried is None else found.carried.index_select(0, start.ends)
        if carried is not None and found.carried is found.hidden:
            return DraftStates(carried, carried)
        return DraftStates(found.hidden.index_select(0, start.ends), carried)

    def _go_on(self, req_rows: Tensor, tokens: Tensor, carried: Tensor | None, number: int) -> DraftStates:
        """A pass over draft `number` of each row, counted from 1."""
        found = chain_next(req_rows, self._rows["lengths"], number - self._offset)
        batch = AttentionBatch(
            page_table=self._runner.page_table,
            token_rows=req_rows,
            positions=found.positions,
            req_rows=req_rows,
            seq_lens=found.seq_lens,
            query_starts=self._one_each[: req_rows.size(0)],
            query_lens=found.query_lens,
            max_query_len=1,
            max_context=self._max_context,
        )
        states: DraftStates = self._draft(tokens, carried, found.positions, self._attention.over(batch))
        return states


def _kernels_of(key: GraphKey) -> tuple[int, bool]:
    """Chains of more than one draft all launch the same kernels."""
    return key.descriptor.num_reqs, key.descriptor.query_len == 1


class DraftAttention:
    """Built for layers of one shape; can be captured for any batch."""

    def __init__(self, backend: AttentionBackend, shape: ModelConfig, kv: KVCache) -> None:
        self._backend = backend
        self._shape = shape
        self._kv = kv

    def over(self, batch: AttentionBatch) -> Attend:
        """The attention of one pass."""
        heads = functools.partial(self._from_heads, batch)
        if self._backend.attend_qkv is None:
            return heads
        return StepAttention(heads, functools.partial(self._from_rows, batch))

    def storing(self, batch: AttentionBatch) -> Attend:
        """The attention of a pass that only stores keys and values: the last layer computes no attention, if
        torch would do it. In one kernel with the rest it costs next to nothing."""
        if self._backend.attend_qkv is not None:
            return self.over(batch)
        return functools.partial(self._store, batch)

    def _store(self, batch: AttentionBatch, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer < self._shape.num_layers - 1:
            return self._from_heads(batch, layer, q, k, v)
        self._backend.write_kv(k, v, *self._kv.layer(layer), batch)
        return q

    def _from_heads(self, batch: AttentionBatch, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_cache, v_cache = self._kv.layer(layer)
        self._backend.write_kv(k, v, k_cache, v_cache, batch)
        scale, window = self._shape.attention_scale, self._shape.layer_windows[layer]
        return self._backend.attend(q, k_cache, v_cache, batch, scale=scale, sliding_window=window)

    def _from_rows(self, batch: AttentionBatch, layer: int, rows: Tensor, heads: HeadPreparation) -> Tensor:
        assert self._backend.attend_qkv is not None
        return self._backend.attend_qkv(
            rows,
            heads,
            *self._kv.layer(layer),
            batch,
            num_heads=self._shape.num_heads,
            scale=self._shape.attention_scale,
            sliding_window=self._shape.layer_windows[layer],
        )


NO_FEATURE = -(1 << 20)
"""`base` of a row that has none."""


class Pairs(NamedTuple):
    """The tokens of a step of the target with the features before them."""

    features: Tensor
    """[T, H]: of the token before each."""
    batch: AttentionBatch


def pairs_of_step(batch: AttentionBatch, features: Tensor, stored: Tensor, base: Tensor) -> Pairs:
    """Each token of a step with the feature of the one before it, from `features` [T, H] of the same step.

    For a request's first token that feature is from the step before, in `stored` [max_rows, n, H]. If
    `stored` lacks it (the request starts here, or after pages that were found in the cache), the token is
    left out.
    """
    num_tokens, width = features.shape
    rows, has_tokens = batch.req_rows, batch.query_lens > 0
    start = batch.seq_lens - batch.query_lens
    before = (start - 1 - base.index_select(0, rows)).long()
    is_left_out = has_tokens & ((start == 0) | (before < 0) | (before >= stored.size(1)))
    places = rows.long() * stored.size(1) + before.clamp(0, stored.size(1) - 1)
    # One past the tokens: where requests without tokens write.
    firsts = torch.where(has_tokens, batch.query_starts, num_tokens).long()
    shifted = features.new_empty(num_tokens + 1, width)
    shifted[1:].copy_(features)
    shifted.index_copy_(0, firsts, stored.view(-1, width).index_select(0, places))
    stays = torch.ones(num_tokens + 1, dtype=torch.bool, device=rows.device)
    stays.index_copy_(0, firsts, ~is_left_out)
    stays = stays[:num_tokens] & (batch.token_rows != 0)
    left_out = is_left_out.int()
    pairs = replace(
        batch,
        token_rows=batch.token_rows * stays,
        positions=(batch.positions - 1) * stays,
        seq_lens=(batch.seq_lens - 1).clamp(min=1),
        query_starts=batch.query_starts + left_out,
        query_lens=batch.query_lens - left_out,
        prefix_lens=None,
    )
    return Pairs(shifted[:num_tokens], pairs)


def keep_features(
    batch: AttentionBatch, features: Tensor | None, lengths: Tensor, stored: Tensor, base: Tensor
) -> None:
    """Keep what the next step and the next drafts need of a step's `features` [T, H], and set `base`.

    Rows whose drafts are being verified have not advanced: the features of all their tokens are kept. For
    other rows only the last one is. `features` None: set `base` only.
    """
    rows, places = batch.req_rows, batch.req_rows.long()
    real = rows != 0
    is_verified = lengths.index_select(0, rows) != batch.seq_lens
    first = batch.seq_lens - torch.where(is_verified, batch.query_lens, 1)
    base.index_copy_(0, places, first * real)
    if features is None:
        return
    num_kept = min(stored.size(1), batch.max_query_len)
    steps = torch.arange(num_kept, device=rows.device)
    last = (batch.query_lens - 1).clamp(min=0).unsqueeze(1)
    # After the last one, the last one is repeated.
    kept = torch.where(is_verified.unsqueeze(1), torch.minimum(steps, last), last)
    chosen = (batch.query_starts.unsqueeze(1) + kept).clamp(max=features.size(0) - 1).long()
    found = features.index_select(0, chosen.view(-1)).view(rows.size(0), num_kept, -1)
    stored[:, :num_kept].index_copy_(0, places, found)
