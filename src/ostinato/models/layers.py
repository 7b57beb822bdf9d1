"""The parts of a transformer: holders of weights, which `weights` fills, and the rotary table.

What a step does with a layer's weights is decided by its form: see `forms`. Shapes in comments: T tokens, H
hidden size, D head dimension.
"""

import math

import torch
from torch import Tensor, nn

from ostinato.kernels.linear.weight import PLAIN, ShardDim, Weight
from ostinato.kernels.norms import rows

from .room import Room
from .rope import RopeConfig


class Linear(nn.Module):
    """Holds the matrix and the bias of `x @ weight.T + bias`.

    Several checkpoint layers with the same input may be stacked in it: `parts` are their rows.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        room: Room,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        shard_dim: ShardDim,
        parts: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        assert not parts or sum(parts) == out_features
        self.name = room.module
        self.format = PLAIN
        self.shard_dim = shard_dim
        self.parts = parts
        self.weight = room.parameter("weight", out_features, in_features)
        self.bias = room.parameter("bias", out_features) if bias else None

    @property
    def matrix(self) -> Weight:
        """The weight in the form that kernels take."""
        return Weight(self.weight, None, self.format, self.shard_dim, self.parts)


class Embedding(nn.Module):
    """A table of one row per token id."""

    def __init__(self, room: Room, rows: int, width: int) -> None:
        super().__init__()
        self.weight = room.parameter("weight", rows, width)

    @property
    def matrix(self) -> Weight:
        """The table as the matrix of an output layer."""
        return Weight(self.weight, shard_dim=0)

    def forward(self, ids: Tensor) -> Tensor:
        """[T] to [T, width]."""
        return self.weight.index_select(0, ids)


class RMSNorm(nn.Module):
    """Scales the last dimension to a mean square of 1, in float32 whatever the dtype of the model."""

    def __init__(self, room: Room, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = room.parameter("weight", width)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as `x`."""
        return rows.rms_norm(x, self.weight, self.eps)


class RotaryTable(nn.Module):
    """cos and sin of every position, computed once; a step only looks rows up."""

    table: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, positions: int) -> None:
        super().__init__()
        # On the CPU, so that every device gets the same bits.
        angles = torch.outer(
            torch.arange(positions, device="cpu").float(), inverse_frequencies(rope, head_dim)
        )
        table = torch.cat([angles.cos(), angles.sin()], dim=-1) * rope.attention_factor
        self.register_buffer("table", table.to(torch.get_default_device()), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The `cos` and signed `sin` that `rotate` takes, each [T, 1, D] in float32."""
        cos, sin = self.table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) of x [T, heads, D] by its position's angle."""
    x32 = x.float()
    swapped = x32.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x32 * cos, swapped, signed_sin).to(x.dtype)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each of the D/2 pairs, float32 on the CPU."""
    exponents = torch.arange(0, head_dim, 2, device="cpu").float() / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return plain
    stretched = plain / rope.factor
    if rope.kind == "linear":
        return stretched
    if rope.kind == "yarn":
        keep = 1 - _yarn_ramp(rope, head_dim)
        return keep * plain + (1 - keep) * stretched
    assert rope.kind == "llama3", rope.kind
    # Long wavelengths are stretched, short ones kept, those between blended by how often they turn in the
    # original context.
    turns = rope.original_max_positions * plain / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return keep * plain + (1 - keep) * stretched


def _yarn_ramp(rope: RopeConfig, head_dim: int) -> Tensor:
    """How much each pair is stretched: 0 for those that turn fast, 1 for those that turn slowly."""

    def pair_that_turns(times: float) -> float:
        """The index of the pair that turns this often in the original context; not an integer."""
        per_pair = math.log(rope.theta) * 2 / head_dim
        return math.log(rope.original_max_positions / (times * 2 * math.pi)) / per_pair

    first = max(math.floor(pair_that_turns(rope.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(rope.beta_slow)), head_dim - 1)
    width = (last - first) or 0.001
    return ((torch.arange(head_dim // 2, device="cpu").float() - first) / width).clamp(0, 1)
