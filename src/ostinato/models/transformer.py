"""The one transformer: Llama, Mistral, Qwen2 and Qwen3 differ only in their `ModelConfig`.

Tokens of all requests are flattened into one dimension T; which of them see each other is up to the caller's
`attend` function. Shapes: H hidden size, D head dimension, Hq/Hkv query and KV heads.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from .config import ModelConfig
from .errors import ModelError
from .layers import Embedding, Linear, RMSNorm, RotaryTable, rotate

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`attend(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D]`; keeps k and v for later steps.
k and v may be views with gaps between tokens: use their strides."""


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
        cos, signed_sin = self.rotary(positions)
        for layer in self.layers:
            x = layer(x, cos, signed_sin, attend)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, H] to float32 scores of every token id [n, vocab]."""
        if not self.config.has_lm_head:
            raise ModelError(
                f"{self.config.architecture} has no output layer; it embeds, it does not generate"
            )
        if self.lm_head is None:
            return functional.linear(hidden, self.embed_tokens.weight).float()
        return self.lm_head(hidden).float()


class Layer(nn.Module):
    """Attention, then the feed-forward network, each added to what came in."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.self_attn = Attention(config, index, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = FeedForward(config, dtype)

    def forward(self, x: Tensor, cos: Tensor, signed_sin: Tensor, attend: Attend) -> Tensor:
        """[T, H] to [T, H]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, signed_sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nn.Module):
    """Projections and rotary embedding around the caller's `attend`."""

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
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)

    def forward(self, x: Tensor, cos: Tensor, signed_sin: Tensor, attend: Attend) -> Tensor:
        """[T, H] to [T, H]."""
        qk, v = self.qkv_proj(x).split([self.q_width + self.kv_width, self.kv_width], dim=-1)
        # q and k stay one tensor through the rotation: half the launches.
        qk = qk.unflatten(-1, (self.num_heads + self.num_kv_heads, self.head_dim))
        if self.qk_norm:
            q, k = qk.split([self.num_heads, self.num_kv_heads], dim=1)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)
        q, k = rotate(qk, cos, signed_sin).split([self.num_heads, self.num_kv_heads], dim=1)
        v = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
        return self.o_proj(attend(self.index, q, k, v).flatten(1))


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
        """[T, H] to [T, H]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(functional.silu(gate) * up)
