"""Attention of a model's layers over its KV cache: inside graphs, between their segments, or eagerly."""

import functools

from torch import Tensor

from ostinato.cache.kv import KVCache
from ostinato.graphs import eager_boundary
from ostinato.kernels.attention.backend import AttentionBackend
from ostinato.kernels.attention.batch import AttentionBatch, HeadPreparation, HostLengths
from ostinato.kernels.linear.products import joined
from ostinato.models.config import ModelConfig
from ostinato.models.mixing import Attend, StepAttention

from .step_inputs import ON_DEVICE


class LayerAttention:
    """The place where a piecewise graph is cut."""

    def __init__(self, backend: AttentionBackend, model: ModelConfig, kv: KVCache) -> None:
        self._backend, self._model, self._kv = backend, model, kv
        self._heads = eager_boundary(self._from_heads)
        self._rows = eager_boundary(self._from_rows)
        self.lengths: HostLengths | None = None
        """The step's lengths, if attention runs outside graphs; None: it runs inside one."""

    def prepare(self) -> None:
        """Prepare what graphs need and cannot allocate themselves."""
        if self._backend.keep_beside is not None:
            for layer in range(self._model.num_layers):
                self._backend.keep_beside(self._kv.layer(layer)[0])

    def over(self, batch: AttentionBatch) -> Attend:
        """The attention of one step."""
        heads = functools.partial(self._heads, batch)
        if self._backend.attend_qkv is None:
            return heads
        return StepAttention(heads, functools.partial(self._rows, batch))

    def of_last_tokens(self, batch: AttentionBatch, places: Tensor) -> Attend:
        """The attention of only the last token of each request, at `places` of the step: for a last layer.
        Inside graphs only."""
        last = batch.of_last_tokens()

        def from_heads(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k_cache, v_cache = self._kv.layer(layer)
            self._backend.write_kv(k, v, k_cache, v_cache, batch)
            scale, window = self._model.attention_scale, self._model.layer_windows[layer]
            q = q.index_select(0, places)
            return self._backend.attend(q, k_cache, v_cache, last, scale=scale, sliding_window=window)

        def from_rows(layer: int, rows: Tensor, heads: HeadPreparation) -> Tensor:
            assert self._backend.store_qkv is not None
            caches, num_heads = self._kv.layer(layer), self._model.num_heads
            self._backend.store_qkv(rows, heads, *caches, batch, num_heads=num_heads)
            # Attention of single tokens reads keys before it waits for the preceding kernel. Here that one is
            # torch's: it starts only after all keys are stored, and is waited for until it ends.
            rows = joined(rows, caches[0].dtype).index_select(0, places)
            return self._from_rows(last, layer, rows, heads)

        if self._backend.attend_qkv is None:
            return from_heads
        return StepAttention(from_heads, from_rows)

    def _from_rows(self, batch: AttentionBatch, layer: int, rows: Tensor, heads: HeadPreparation) -> Tensor:
        assert self._backend.attend_qkv is not None
        return self._backend.attend_qkv(
            rows,
            heads,
            *self._kv.layer(layer),
            batch,
            num_heads=self._model.num_heads,
            scale=self._model.attention_scale,
            sliding_window=self._model.layer_windows[layer],
        )

    def _from_heads(self, batch: AttentionBatch, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_cache, v_cache = self._kv.layer(layer)
        self._backend.write_kv(k, v, k_cache, v_cache, batch)
        scale, window = self._model.attention_scale, self._model.layer_windows[layer]
        if self.lengths is None:
            return self._backend.attend(q, k_cache, v_cache, batch, scale=scale, sliding_window=window)
        return self._backend.attend_eager(
            q,
            k_cache,
            v_cache,
            batch,
            scale=scale,
            sliding_window=window,
            lengths=None if self.lengths is ON_DEVICE else self.lengths,
        )
