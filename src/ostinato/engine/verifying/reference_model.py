"""The forward pass over whole histories: plain torch in float32, sharing no code with the graphs.

No page, no cache, no batch: every request attends densely over its own tokens. Weights are those of the
loaded model, converted one matrix at a time, so that little memory is needed beyond the model's. The angles
of the rotation are computed here from the model's configuration, not read from its table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor

from ostinato.models.layer import Layer
from ostinato.models.layers import Linear
from ostinato.models.rope import RopeConfig
from ostinato.models.transformer import Transformer

_TOKENS_AT_ONCE = 1024
_SCORES_AT_ONCE = 1 << 26
_WORDS_AT_ONCE = 16384

OnKV = Callable[[int, Tensor, Tensor], None]
"""Called with a layer and the keys (rotated) and values of all tokens, float32 [T, Hkv, D]."""

Added = Callable[[str, Tensor, Tensor], Tensor]
"""Called with a layer's name, its input [T, in] and the slots [T] of its tokens: what to add, [T, out]."""


@contextmanager
def exact_products() -> Iterator[None]:
    """Float32 products in full float32, whatever the global setting."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32 = before


class ReferenceModel:
    """A loaded model, computed slowly.

    `rounded_to` rounds the result of every operation to that type: its distance from float32 is what no
    computation in that type can avoid.
    """

    def __init__(
        self, model: Transformer, rounded_to: torch.dtype | None = None, added: Added | None = None
    ) -> None:
        """`added`: what adapters add to the products of linear layers."""
        self._model = model
        self._added = added
        self._slots: Tensor | None = None
        self._config = model.config
        self._rounded_to = rounded_to

    def hidden_states(
        self,
        histories: Sequence[Sequence[int]],
        on_kv: OnKV | None = None,
        slots: Sequence[int] | None = None,
    ) -> Tensor:
        """float32 [T, H]: the normalised last hidden states of all tokens, one history after the other;
        `slots`: of each history's adapter."""
        model, config = self._model, self._config
        device = model.embed_tokens.weight.device
        lengths = [len(history) for history in histories]
        ids = torch.tensor([token for history in histories for token in history], device=device)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        if slots is not None:
            self._slots = torch.tensor(slots).repeat_interleave(torch.tensor(lengths)).to(device)
        x = self._rounded(model.embed_tokens.weight.index_select(0, ids).float())
        cos, sin = rotation(config.rope, config.head_dim, positions)
        for index, module in enumerate(model.layers):
            layer = cast(Layer, module)
            q, k, v = self._heads(layer, x)
            q, k = self._rounded(_turned(q, cos, sin)), self._rounded(_turned(k, cos, sin))
            if on_kv is not None:
                on_kv(index, k, v)
            mixed = [
                self._attention(*parts, config.layer_windows[index])
                for parts in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
            ]
            x = self._rounded(x + self._linear(torch.cat(mixed).flatten(1), layer.self_attn.o_proj))
            x = self._rounded(x + self._feed_forward(layer, x))
        return self._norm(x, model.norm.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab] of normalised hidden states [n, H]."""
        head = self._model.lm_head
        weight = self._model.embed_tokens.weight if head is None else head.weight
        out = hidden.new_empty(hidden.size(0), weight.size(0))
        for begin in range(0, weight.size(0), _WORDS_AT_ONCE):
            words = slice(begin, begin + _WORDS_AT_ONCE)
            out[:, words] = hidden @ weight[words].float().T
        return out

    def _rounded(self, x: Tensor) -> Tensor:
        return x if self._rounded_to is None else x.to(self._rounded_to).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self._config.rms_norm_eps).sqrt()
        return self._rounded(x / scale * weight.float())

    def _linear(self, x: Tensor, layer: Linear, begin: int = 0) -> Tensor:
        """Product for the tokens from `begin` on."""
        product = x @ layer.weight.float().T
        if self._added is not None and self._slots is not None:
            product = product + self._added(layer.name, x, self._slots[begin : begin + x.size(0)])
        return self._rounded(product if layer.bias is None else product + layer.bias.float())

    def _heads(self, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config, attention = self._config, layer.self_attn
        rows = self._linear(self._norm(x, layer.input_layernorm.weight), attention.qkv_proj)
        heads = rows.unflatten(1, (config.num_heads + 2 * config.num_kv_heads, config.head_dim))
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if attention.qk_norm:
            q, k = self._norm(q, attention.q_norm.weight), self._norm(k, attention.k_norm.weight)
        return q, k, v

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """One request: q [L, Hq, D] over k and v [L, Hkv, D], some queries at a time."""
        length, num_heads, _ = q.shape
        # Query head h belongs to KV head h // group.
        group = num_heads // k.size(1)
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        seen = torch.arange(length, device=q.device)
        size = max(1, _SCORES_AT_ONCE // (num_heads * length))
        outputs = []
        for begin in range(0, length, size):
            at = seen[begin : begin + size].unsqueeze(1)
            hidden = seen > at
            if window is not None:
                hidden |= seen <= at - window
            scores = torch.einsum("qhd,khd->hqk", q[begin : begin + size], k) * self._config.head_dim**-0.5
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
        return self._rounded(torch.cat(outputs))

    def _feed_forward(self, layer: Layer, x: Tensor) -> Tensor:
        normed = self._norm(x, layer.post_attention_layernorm.weight)
        outputs = []
        for number, piece in enumerate(normed.split(_TOKENS_AT_ONCE)):
            begin = number * _TOKENS_AT_ONCE
            gate, up = self._linear(piece, layer.mlp.gate_up_proj, begin).chunk(2, dim=-1)
            inner = self._rounded(gate / (1 + torch.exp(-gate)) * up)
            outputs.append(self._linear(inner, layer.mlp.down_proj, begin))
        return torch.cat(outputs)


def rotation(rope: RopeConfig, head_dim: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, D/2] of the angle by which each pair of a head is rotated."""
    speeds = [_speed(rope, pair, head_dim) for pair in range(head_dim // 2)]
    angles = torch.outer(positions.double(), torch.tensor(speeds, dtype=torch.float64).to(positions.device))
    longer = rope.attention_factor
    return (angles.cos() * longer).float().unsqueeze(1), (angles.sin() * longer).float().unsqueeze(1)


def _speed(rope: RopeConfig, pair: int, head_dim: int) -> float:
    """Radians per position of one pair, as in the models' papers."""
    speed: float = rope.theta ** (-2.0 * pair / head_dim)
    if rope.kind == "linear":
        return speed / rope.factor
    if rope.kind == "default":
        return speed
    if rope.kind == "yarn":
        return speed * (1 - _yarn_share(rope, pair, head_dim) * (1 - 1 / rope.factor))
    assert rope.kind == "llama3", rope.kind
    wavelength = 2 * math.pi / speed
    if wavelength < rope.original_max_positions / rope.high_freq_factor:
        return speed
    if wavelength > rope.original_max_positions / rope.low_freq_factor:
        return speed / rope.factor
    smooth = rope.original_max_positions / wavelength - rope.low_freq_factor
    smooth /= rope.high_freq_factor - rope.low_freq_factor
    return (1 - smooth) * speed / rope.factor + smooth * speed


def _yarn_share(rope: RopeConfig, pair: int, head_dim: int) -> float:
    """How much of the stretching a pair gets: by its place between the pairs that rotate beta_fast and
    beta_slow times in the original context, both rounded outwards."""
    per_turn = head_dim / (2 * math.log(rope.theta))
    fast, slow = (
        per_turn * math.log(rope.original_max_positions / (2 * math.pi * turns))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    low, high = max(math.floor(fast), 0), min(math.ceil(slow), head_dim - 1)
    return min(1.0, max(0.0, (pair - low) / ((high - low) or 0.001)))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
