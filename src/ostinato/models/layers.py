"""The layers a transformer is made of. Weights are parameters without gradient, filled by `weights`.

Shapes in comments: T tokens, H hidden size, D head dimension.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from ostinato.kernels import rows
from ostinato.kernels.linear import few_tokens, products, scaled_rows
from ostinato.kernels.linear.scaled_rows import ScaledRows

from .config import RopeConfig

ShardDim = Literal[0, 1] | None
"""Which dimension of a weight tensor parallelism splits: 0 by output, 1 by input, None not at all."""
WeightFormat = Literal["plain"]
"""How a weight is stored; `plain` is one tensor in the model's dtype."""


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Room for a weight on the current default device."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """`x @ weight.T + bias`. Several checkpoint layers with the same input may be fused by rows: `parts`."""

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        shard_dim: ShardDim,
        dtype: torch.dtype,
        parts: dict[str, int] | None = None,
        weight_format: WeightFormat = "plain",
    ) -> None:
        """`parts` maps the names of the checkpoint layers to their rows, in order."""
        super().__init__()
        assert parts is None or sum(parts.values()) == out_features
        self.shard_dim = shard_dim
        self.weight_format = weight_format
        self.parts = parts
        self.weight = empty_parameter(out_features, in_features, dtype=dtype)
        self.bias = empty_parameter(out_features, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        return products.linear(x, self.weight, self.bias)

    def in_parts(self, x: Tensor) -> Tensor:
        """What `forward` returns, or float32 [parts, T, out] whose sum it is; see `RMSNorm.after_adding`."""
        return products.linear_in_parts(x, self.weight, self.bias)

    def gated(self, x: Tensor) -> Tensor:
        """silu(first half) * second half of what `forward` returns."""
        return products.gated_linear(x, self.weight, self.bias)

    def fused(
        self,
        x: Tensor,
        *,
        norm: "RMSNorm | None" = None,
        gated: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        """`residual + gate(forward(norm(x)))`, each part where it is asked for: see `few_tokens`."""
        norm_weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return few_tokens.project(
            x, self.weight, self.bias, norm_weight=norm_weight, eps=eps, gated=gated, residual=residual
        )

    def of_scaled(self, x: ScaledRows, norm: "RMSNorm", *, gated: bool = False) -> Tensor:
        """`forward(norm(rows))`, gated if asked; `x` was scaled by the weight of that norm."""
        return scaled_rows.project(x, self.weight, self.bias, norm.eps, gated=gated)

    def added_to(self, rows: ScaledRows, x: Tensor, norm: "RMSNorm") -> ScaledRows:
        """`rows + forward(x)`, scaled by the weight of `norm`; `rows` are gone."""
        return scaled_rows.add_projected(rows, x, self.weight, self.bias, norm.weight)


class Embedding(nn.Module):
    """A table of one row per token id."""

    def __init__(self, rows: int, width: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.shard_dim: ShardDim = 0
        self.weight = empty_parameter(rows, width, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """[T] to [T, width]."""
        return self.weight.index_select(0, ids)


class RMSNorm(nn.Module):
    """Scales the last dimension to a mean square of one, in float32 whatever the dtype of the model."""

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as `x`."""
        return rows.rms_norm(x, self.weight, self.eps)

    def begun(self, x: Tensor) -> ScaledRows:
        """Rows and what the next layer needs to normalise them."""
        return scaled_rows.scale(x, self.weight)

    def after_adding(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of `residual + x`, and that sum, perhaps in the memory of `residual`.

        x may be in parts, as `Linear.in_parts` returns it.
        """
        return rows.add_rms_norm(x, residual, self.weight, self.eps)


class RotaryTable(nn.Module):
    """cos and sin of every position, computed once; a step only looks rows up."""

    table: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, positions: int) -> None:
        super().__init__()
        # On the CPU, so that every device gets the same bits.
        angles = torch.outer(
            torch.arange(positions, device="cpu").float(), inverse_frequencies(rope, head_dim)
        )
        table = torch.cat([angles.cos(), angles.sin()], dim=-1)
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
    assert rope.kind == "llama3", rope.kind
    # Long wavelengths are stretched, short ones kept, those between blended by how often they turn in the
    # original context.
    turns = rope.original_max_positions * plain / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return keep * plain + (1 - keep) * stretched
