"""How the tokens of a step attend to each other: from the rows of a layer's QKV projection to attention.

The caller's `attend` decides which tokens belong together, and where keys and values are stored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ostinato.kernels.attention.batch import HeadPreparation
from ostinato.kernels.linear.products import joined

from .layer import Attention
from .layers import RotaryTable, rotate

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`attend(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D]`; stores k and v for later steps.
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


class Mix(Protocol):
    """From the rows of a layer's QKV projection to attention [T, Hq, D]."""

    def __call__(self, layer: Attention, rows: Tensor) -> Tensor:
        """Rows [T, (Hq + 2 Hkv) * D], or parts of them, as `products.linear_in_parts` returns them."""
        ...


@dataclass(frozen=True, eq=False)
class FromRows:
    """The caller's attention takes the rows unchanged."""

    attend: StepAttention
    rotary: Tensor

    def __call__(self, layer: Attention, rows: Tensor) -> Tensor:
        """As `Mix`."""
        q_norm, k_norm = (layer.q_norm.weight, layer.k_norm.weight) if layer.qk_norm else (None, None)
        return self.attend.rows(layer.index, rows, HeadPreparation(self.rotary, q_norm, k_norm, layer.eps))


@dataclass(frozen=True, eq=False)
class FromHeads:
    """Heads are normalised and rotated here; `cos` and `signed_sin` are those of the step's positions."""

    attend: Attend
    cos: Tensor
    signed_sin: Tensor

    def __call__(self, layer: Attention, rows: Tensor) -> Tensor:
        """As `Mix`."""
        rows = joined(rows, layer.qkv_proj.weight.dtype)
        qk, v = rows.split([layer.q_width + layer.kv_width, layer.kv_width], dim=-1)
        # q and k stay one tensor through the rotation: half the launches.
        qk = qk.unflatten(-1, (layer.num_heads + layer.num_kv_heads, layer.head_dim))
        if layer.qk_norm:
            q, k = qk.split([layer.num_heads, layer.num_kv_heads], dim=1)
            qk = torch.cat([layer.q_norm(q), layer.k_norm(k)], dim=1)
        turned = rotate(qk, self.cos, self.signed_sin)
        q, k = turned.split([layer.num_heads, layer.num_kv_heads], dim=1)
        return self.attend(layer.index, q, k, v.unflatten(-1, (layer.num_kv_heads, layer.head_dim)))


def mix_of(attend: Attend, rotary: RotaryTable, positions: Tensor) -> Mix:
    """How tokens at these positions [T] attend to each other, in every layer of a step."""
    if isinstance(attend, StepAttention):
        return FromRows(attend, rotary.table)
    return FromHeads(attend, *rotary(positions))
