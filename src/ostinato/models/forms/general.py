"""The form of any step on any device: norms are separate, and a sum is computed by the norm that reads it."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ostinato.kernels.linear import products
from ostinato.kernels.linear.products import joined
from ostinato.kernels.linear.weight import PLAIN
from ostinato.kernels.lora import Adapters, adapted_by
from ostinato.kernels.lora.low_rank import Deltas
from ostinato.kernels.norms.rows import add_rms_norm, rms_norm

from ..layers import Linear, RMSNorm
from .form import Form, Step


class Sum(NamedTuple):
    """The residual stream is `rows + added`."""

    rows: Tensor
    added: Tensor | None = None
    """Possibly in parts, as `products.linear_in_parts` returns it; None: nothing."""
    deltas: Deltas | None = None
    """What adapters have yet to add to it."""
    normed: Tensor | None = None
    """The result of the last norm."""


@dataclass(frozen=True, eq=False)
class General(Form[Sum]):
    """Runs everything, adapters included: kernels return plain products."""

    adapters: Adapters | None = None

    name = "general"
    keeps_input = False

    def why_not(self, step: Step) -> str | None:
        """As `Form`."""
        if step.formats != {PLAIN}:
            return f"its kernels take plain weights, not {', '.join(sorted(step.formats))}"
        return None

    def begin(self, x: Tensor, norm: RMSNorm) -> Sum:
        """As `Form`."""
        return Sum(x)

    def normed(self, rows: Sum, norm: RMSNorm) -> Sum:
        """As `Form`."""
        if rows.added is None:
            return Sum(rows.rows, normed=rms_norm(rows.rows, norm.weight, norm.eps))
        normed, total = add_rms_norm(rows.added, rows.rows, norm.weight, norm.eps, rows.deltas)
        return Sum(total, normed=normed)

    def project(self, rows: Sum, norm: RMSNorm, linear: Linear, *, gated: bool = False) -> Tensor:
        """As `Form`."""
        x = rows.normed
        assert x is not None
        if gated:
            return products.gated_linear(
                x, linear.matrix, linear.bias, adapted_by(self.adapters, linear.name)
            )
        return products.linear_in_parts(x, linear.matrix, linear.bias, adapted_by(self.adapters, linear.name))

    def add(self, rows: Sum, linear: Linear, x: Tensor, next_norm: RMSNorm) -> Sum:
        """As `Form`."""
        adapted = adapted_by(self.adapters, linear.name)
        if products.adds_in_place(x, linear.matrix, adapted):
            products.add_linear(rows.rows, x, linear.matrix, linear.bias)
            return Sum(rows.rows)
        product, deltas = products.linear_beside_adapters(x, linear.matrix, linear.bias, adapted)
        return Sum(rows.rows, added=product, deltas=deltas)

    def stream(self, rows: Sum) -> Tensor:
        """As `Form`."""
        if rows.added is None:
            return rows.rows
        assert rows.deltas is None, "taken after a norm"
        return rows.rows + joined(rows.added, rows.rows.dtype)

    def end(self, rows: Sum, norm: RMSNorm) -> Tensor:
        """As `Form`."""
        normed = self.normed(rows, norm).normed
        assert normed is not None
        return normed
