"""The one transformer: Llama, Mistral, Qwen2 and Qwen3 differ only in their `ModelConfig`.

Tokens of all requests are flattened into one dimension T; which of them see each other is up to the caller's
`attend` function. Shapes: H hidden size, D head dimension, Hq/Hkv query and KV heads.

A step has one of three forms. In general the sum of a layer's output and what came in waits for the next
norm, which does both at once. For very few tokens on a GPU, norms and sums are parts of the linear layers.
For more there may be layers that add to what came in and leave half of the next norm to the one behind it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
from torch import Tensor, nn

from ostinato.kernels.attention.heads import HeadPreparation
from ostinato.kernels.linear import few_tokens, products, scaled_rows
from ostinato.kernels.linear.scaled_rows import ScaledRows
from ostinato.kernels.linear.tiles import MatrixShape

from .config import ModelConfig
from .errors import ModelError
from .layers import Embedding, Linear, RMSNorm, RotaryTable, rotate

Form = Literal["few", "scaled", "general"]
"""Of a step: see above."""
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`attend(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D]`; keeps k and v for later steps.
k and v may be views with gaps between tokens: use their strides."""

AttendRows = Callable[[int, Tensor, HeadPreparation], Tensor]
"""`attend(layer, rows [T, (Hq + 2 Hkv) * D], heads) -> [T, Hq, D]`: norm and rotation of heads included."""


@dataclass(frozen=True, eq=False)
class StepAttention:
    """An `Attend` that can also start from the rows of the QKV projection, in fewer kernels."""

    heads: Attend
    rows: AttendRows

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As a plain `Attend`."""
        return self.heads(layer, q, k, v)


class Transformer(nn.Module):
    """Token ids and positions to hidden states, hidden states to logits. Weights are uninitialised."""

    lm_head: Linear | None

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_positions: int | None = None,
    ) -> None:
        """`max_positions` bounds the rotary table, by default at the model's own context length."""
        super().__init__()
        self.config = config
        self._run: Sequence[int] = range(config.num_layers)
        self.matrix_shapes = _matrix_shapes(config)
        self.most_few_tokens = few_tokens.most_tokens(self.matrix_shapes, dtype, torch.device(device))
        with torch.device(device):
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
            self.rotary = RotaryTable(
                config.rope, config.head_dim, max_positions or config.max_position_embeddings
            )
            self.layers = nn.ModuleList(Layer(config, index, dtype) for index in range(config.num_layers))
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
            self.lm_head = (
                Linear(config.hidden_size, config.vocab_size, bias=False, shard_dim=0, dtype=dtype)
                if config.has_lm_head and not config.tie_word_embeddings
                else None
            )

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """input_ids and positions, both int64 [T], to normalised hidden states [T, H]."""
        x = self.embed_tokens(input_ids)
        if isinstance(attend, StepAttention):
            mix: Mix = FromRows(attend, self.rotary.table)
        else:
            mix = FromHeads(attend, *self.rotary(positions))
        return self.through([cast(Layer, self.layers[index]) for index in self._run], x, mix)

    def through(self, layers: "Sequence[Layer]", x: Tensor, mix: "Mix") -> Tensor:
        """[T, H] through some layers to normalised hidden states; in the form that this number of tokens has.

        What is in the memory of x afterwards is of no use.
        """
        match self.form(x.size(0)):
            case "few":
                for layer in layers:
                    x = layer.forward_few(x, mix)
            case "scaled":
                norms = [*(layer.input_layernorm for layer in layers), self.norm]
                rows = norms[0].begun(x)
                for layer, norm in zip(layers, norms[1:], strict=True):
                    rows = layer.forward_scaled(rows, mix, norm)
                x = rows.rows
            case _:
                added: Tensor | None = None
                for layer in layers:
                    x, added = layer(x, added, mix)
                if added is not None:
                    return self.norm.after_adding(added, x)[0]
        return self.norm(x)

    def form(self, num_tokens: int) -> Form:
        """How a step of so many tokens runs."""
        weight = self.embed_tokens.weight
        if not weight.is_cuda:
            return "general"
        if num_tokens <= self.most_few_tokens:
            return "few"
        if scaled_rows.are_the_choice(self.matrix_shapes, num_tokens, weight.dtype, weight.device):
            return "scaled"
        return "general"

    @contextmanager
    def one_layer_of_each_kind(self) -> Iterator[None]:
        """Inside, steps launch every kernel that they would, and no layer whose kernels another has launched.

        What they return is of no use. Layers differ by their window, and the first in having nothing to add.
        """
        windows = self.config.layer_windows
        first_of_each = {windows.index(window) for window in windows}
        all_layers = self._run
        self._run = sorted(first_of_each | set(range(len(windows))[:2]))
        try:
            yield
        finally:
            self._run = all_layers

    def products_of(self, num_tokens: int, num_outputs: int) -> list[tuple[MatrixShape, int]]:
        """The matrices of a step with the rows that each is multiplied with."""
        head = MatrixShape(self.config.vocab_size, self.config.hidden_size)
        return [*((shape, num_tokens) for shape in self.matrix_shapes), (head, num_outputs)]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Hidden states [n, H] to float32 scores of every token id [n, vocab], in `out` if that is given."""
        if not self.config.has_lm_head:
            raise ModelError(
                f"{self.config.architecture} has no output layer; it embeds, it does not generate"
            )
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return products.float_linear(hidden, weight, out)


class Mix(Protocol):
    """How a layer's tokens mix: from the rows of its QKV projection to attention [T, Hq, D]."""

    def __call__(self, layer: "Attention", rows: Tensor) -> Tensor:
        """Rows [T, (Hq + 2 Hkv) * D], or parts of them, as `Linear.in_parts` returns them."""
        ...


@dataclass(frozen=True, eq=False)
class FromRows:
    """The caller's attention takes the rows as they are."""

    attend: StepAttention
    rotary: Tensor

    def __call__(self, layer: "Attention", rows: Tensor) -> Tensor:
        """As `Mix`."""
        q_norm, k_norm = (layer.q_norm.weight, layer.k_norm.weight) if layer.qk_norm else (None, None)
        return self.attend.rows(layer.index, rows, HeadPreparation(self.rotary, q_norm, k_norm, layer.eps))


@dataclass(frozen=True, eq=False)
class FromHeads:
    """Heads are normalised and turned here; `cos` and `signed_sin` are those of the step's positions."""

    attend: Attend
    cos: Tensor
    signed_sin: Tensor

    def __call__(self, layer: "Attention", rows: Tensor) -> Tensor:
        """As `Mix`."""
        rows = products.joined(rows, layer.qkv_proj.weight.dtype)
        qk, v = rows.split([layer.q_width + layer.kv_width, layer.kv_width], dim=-1)
        # q and k stay one tensor through the rotation: half the launches.
        qk = qk.unflatten(-1, (layer.num_heads + layer.num_kv_heads, layer.head_dim))
        if layer.qk_norm:
            q, k = qk.split([layer.num_heads, layer.num_kv_heads], dim=1)
            qk = torch.cat([layer.q_norm(q), layer.k_norm(k)], dim=1)
        turned = rotate(qk, self.cos, self.signed_sin)
        q, k = turned.split([layer.num_heads, layer.num_kv_heads], dim=1)
        return self.attend(layer.index, q, k, v.unflatten(-1, (layer.num_kv_heads, layer.head_dim)))


class Layer(nn.Module):
    """Attention, then the feed-forward network, each added to what came in."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.self_attn = Attention(config, index, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = FeedForward(config, dtype)

    def forward(self, x: Tensor, added: Tensor | None, mix: Mix) -> tuple[Tensor, Tensor]:
        """What came in is `x + added`; so is what goes out, `added` not yet added, and perhaps in parts."""
        if added is None:
            normed = self.input_layernorm(x)
        else:
            normed, x = self.input_layernorm.after_adding(added, x)
        normed, x = self.post_attention_layernorm.after_adding(self.self_attn(normed, mix), x)
        return x, self.mlp(normed)

    def forward_few(self, x: Tensor, mix: Mix) -> Tensor:
        """[T, H] to [T, H] for very few tokens."""
        attention, mlp = self.self_attn, self.mlp
        qkv = attention.qkv_proj.fused(x, norm=self.input_layernorm)
        x = attention.o_proj.fused(mix(attention, qkv).flatten(1), residual=x)
        inner = mlp.gate_up_proj.fused(x, norm=self.post_attention_layernorm, gated=True)
        return mlp.down_proj.fused(inner, residual=x)

    def forward_scaled(self, rows: ScaledRows, mix: Mix, next_norm: RMSNorm) -> ScaledRows:
        """Rows scaled by the weight of this layer's norm to rows scaled by that of the next."""
        attention, mlp = self.self_attn, self.mlp
        mixed = mix(attention, attention.qkv_proj.of_scaled(rows, self.input_layernorm)).flatten(1)
        rows = attention.o_proj.added_to(rows, mixed, self.post_attention_layernorm)
        inner = mlp.gate_up_proj.of_scaled(rows, self.post_attention_layernorm, gated=True)
        return mlp.down_proj.added_to(rows, inner, next_norm)


class Attention(nn.Module):
    """Projections around the caller's attention."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.index = index
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        self.q_width, self.kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = Linear(
            config.hidden_size,
            self.q_width + 2 * self.kv_width,
            bias=config.qkv_bias,
            shard_dim=0,
            dtype=dtype,
            parts={"q_proj": self.q_width, "k_proj": self.kv_width, "v_proj": self.kv_width},
        )
        self.o_proj = Linear(
            self.q_width, config.hidden_size, bias=config.output_bias, shard_dim=1, dtype=dtype
        )
        self.eps = config.rms_norm_eps
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)

    def forward(self, x: Tensor, mix: Mix) -> Tensor:
        """[T, H] to [T, H], perhaps in parts."""
        return self.o_proj.in_parts(mix(self, self.qkv_proj.in_parts(x)).flatten(1))


class FeedForward(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(
            hidden,
            2 * inner,
            bias=config.mlp_bias,
            shard_dim=0,
            dtype=dtype,
            parts={"gate_proj": inner, "up_proj": inner},
        )
        self.down_proj = Linear(inner, hidden, bias=config.mlp_bias, shard_dim=1, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] to [T, H], perhaps in parts."""
        return self.down_proj.in_parts(self.gate_up_proj.gated(x))


def _matrix_shapes(config: ModelConfig) -> tuple[MatrixShape, ...]:
    """The matrices of a layer."""
    hidden, inner, q_width = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    return (
        MatrixShape(q_width + 2 * config.num_kv_heads * config.head_dim, hidden),
        MatrixShape(hidden, q_width),
        MatrixShape(inner, hidden, gated=True),
        MatrixShape(hidden, inner),
    )
