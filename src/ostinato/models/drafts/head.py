"""What EAGLE and EAGLE-3 heads have in common: one layer; embeddings and output layer may be the target's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ostinato.kernels.linear import products
from ostinato.kernels.linear.tiles import MatrixShape

from ..config import ModelConfig
from ..forms import Form, Step, form_of
from ..layer import Attention, FeedForward
from ..layers import Embedding, Linear, RMSNorm, RotaryTable
from ..mixing import Attend, mix_of
from ..room import Room
from .draft import Draft, DraftStates
from .target_parts import TargetParts


@dataclass(frozen=True)
class HeadShape:
    """What distinguishes one head from another, besides its method."""

    layer: ModelConfig
    """Shape of its layer: `num_layers` is 1."""
    draft_vocab: int
    """Number of tokens of its own output layer."""
    tapped_layers: tuple[int, ...] = ()
    """EAGLE-3: the layers of the target before which features are taken."""
    fc_bias: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    has_embedding: bool = False
    """Whether it has its own embeddings."""
    has_lm_head: bool = False
    """Whether it has its own output layer."""


class HeadLayer(nn.Module):
    """The layer of a head, without the steps before its QKV projection."""

    def __init__(self, config: ModelConfig, room: Room, in_features: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, 0, room.of("self_attn"), in_features)
        norm = room.of("post_attention_layernorm")
        self.post_attention_layernorm = RMSNorm(norm, config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config, 0, room.of("mlp"))


class Head(Draft):
    """One layer over tokens and features."""

    slot_offset = 1
    layer: HeadLayer
    embed_tokens: Embedding | None
    lm_head: Linear | None

    def __init__(self, shape: HeadShape, target: TargetParts, max_positions: int, room: Room) -> None:
        super().__init__()
        config = shape.layer
        self.shape = config
        self.vocab_size = shape.draft_vocab
        self._target = target
        hidden = config.hidden_size
        self.embed_tokens = (
            Embedding(room.of("embed_tokens"), config.vocab_size, hidden) if shape.has_embedding else None
        )
        self.lm_head = (
            Linear(room.of("lm_head"), hidden, shape.draft_vocab, bias=False, shard_dim=0)
            if shape.has_lm_head
            else None
        )
        with room.device:
            self.rotary = RotaryTable(config.rope, config.head_dim, max_positions)

    def embedded(self, input_ids: Tensor) -> Tensor:
        """Embeddings of tokens, [T, H]."""
        return (self.embed_tokens or self._target.embed_tokens)(input_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Draft`."""
        return products.float_linear(hidden, (self.lm_head or self._target.lm_head).matrix)

    def _form(self, num_tokens: int) -> Form[Any]:
        """The form in which the steps after the QKV projection run."""
        config, weight = self.shape, self.layer.mlp.down_proj
        hidden, inner = config.hidden_size, config.intermediate_size
        shapes = (
            MatrixShape(hidden, config.num_heads * config.head_dim),
            MatrixShape(inner, hidden, gated=True),
            MatrixShape(hidden, inner),
        )
        formats = frozenset({weight.format})
        return form_of(Step(num_tokens, shapes, formats, weight.weight.dtype, weight.weight.device))

    def _projected(self, x: Tensor) -> Tensor:
        qkv = self.layer.self_attn.qkv_proj
        return products.linear_in_parts(x, qkv.matrix, qkv.bias)

    def _stored(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run rows [T, in] through the layer's attention."""
        mix = mix_of(attend, self.rotary, positions)
        return mix(self.layer.self_attn, self._projected(x)).flatten(1)

    def _behind_attention(self, residual: Tensor, mixed: Tensor, norm: RMSNorm | None) -> DraftStates:
        """Run the rest of the layer; the `norm` after it applies to `hidden` only."""
        layer, form = self.layer, self._form(residual.size(0))
        between = layer.post_attention_layernorm
        rows = form.add(form.begin(residual, between), layer.self_attn.o_proj, mixed, between)
        rows = form.feed(rows, between, layer.mlp, norm or between)
        if norm is None:
            stream = form.stream(rows)
            return DraftStates(stream, stream)
        rows = form.normed(rows, norm)
        return DraftStates(form.end(rows, norm), form.stream(rows))
