"""Attention of a draft over keys and values of its own, in the pages of the target."""

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
    """Made for layers of one shape; can be captured for any batch."""

    def __init__(self, backend: AttentionBackend, shape: ModelConfig, kv: KVCache) -> None:
        self._backend = backend
        self._shape = shape
        self._kv = kv

    def over(self, batch: AttentionBatch) -> Attend:
        """That of one pass."""
        heads = functools.partial(self._from_heads, batch)
        if self._backend.attend_qkv is None:
            return heads
        return StepAttention(heads, functools.partial(self._from_rows, batch))

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
