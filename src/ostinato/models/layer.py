"""One layer of a model: its weights, under their checkpoint names, and its kind."""

from torch import nn

from .config import ModelConfig
from .layers import Linear, RMSNorm
from .room import Room


class Layer(nn.Module):
    """Attention, then the feed-forward network, each added to its input; `forms` defines the operations."""

    def __init__(self, config: ModelConfig, index: int, room: Room) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(room.of("input_layernorm"), hidden, eps)
        self.self_attn = Attention(config, index, room.of("self_attn"))
        self.post_attention_layernorm = RMSNorm(room.of("post_attention_layernorm"), hidden, eps)
        self.mlp = FeedForward(config, index, room.of("mlp"))


class Attention(nn.Module):
    """The projections around attention."""

    def __init__(self, config: ModelConfig, index: int, room: Room, in_features: int | None = None) -> None:
        """`in_features`: width of the input, if not the model's."""
        super().__init__()
        kind = config.layers[index]
        self.index = index
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.q_width, self.kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        parts = (self.q_width, self.kv_width, self.kv_width)
        self.qkv_proj = Linear(
            room.of("qkv_proj"),
            in_features or config.hidden_size,
            sum(parts),
            bias=kind.qkv_bias,
            shard_dim=0,
            parts=parts,
        )
        self.o_proj = Linear(
            room.of("o_proj"), self.q_width, config.hidden_size, bias=kind.output_bias, shard_dim=1
        )
        self.eps = config.rms_norm_eps
        self.qk_norm = kind.qk_norm
        if kind.qk_norm:
            self.q_norm = RMSNorm(room.of("q_norm"), config.head_dim, self.eps)
            self.k_norm = RMSNorm(room.of("k_norm"), config.head_dim, self.eps)


class FeedForward(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig, index: int, room: Room) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.layers[index].mlp_bias
        self.gate_up_proj = Linear(
            room.of("gate_up_proj"), hidden, 2 * inner, bias=bias, shard_dim=0, parts=(inner, inner)
        )
        self.down_proj = Linear(room.of("down_proj"), inner, hidden, bias=bias, shard_dim=1)
