"""Attention of a draft over its own keys and values, in pages numbered like the target's."""

from __future__ import annotations

import functools

from torch import Tensor

from ostinato.cache.kv import KVCache
from ostinato.kernels.attention.backend import AttentionBackend
from ostinato.kernels.attention.batch import AttentionBatch
from ostinato.kernels.attention.heads import HeadPreparation
from ostinato.models.config import ModelConfig
from ostinato.models.mixing import Attend, StepAttention


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
