"""The form of dozens of tokens on a Hopper GPU: a layer leaves half of the next norm to the following one."""

from dataclasses import dataclass

from torch import Tensor

from ostinato.kernels.linear import scaled_rows
from ostinato.kernels.linear.scaled_rows import ScaledRows
from ostinato.kernels.linear.weight import PLAIN
from ostinato.kernels.lora import Adapters, adapted_by

from ..layers import Linear, RMSNorm
from .form import Form, Step


@dataclass(frozen=True, eq=False)
class Scaled(Form[ScaledRows]):
    """Rows are kept together with what the next norm needs of them.

    Kernels return products gated or added to the rows, and the normalised rows never exist: adapters read
    scaled rows, and add to products before the norm's factor is applied.
    """

    adapters: Adapters | None = None

    name = "scaled"
    keeps_input = False

    def why_not(self, step: Step) -> str | None:
        """As `Form`."""
        if step.formats != {PLAIN}:
            return f"its kernels take plain weights, not {', '.join(sorted(step.formats))}"
        if not scaled_rows.are_the_choice(step.shapes, step.num_tokens, step.dtype, step.device):
            return "wide kernels are not chosen for all matrices of a layer"
        return None

    def begin(self, x: Tensor, norm: RMSNorm) -> ScaledRows:
        """As `Form`."""
        return scaled_rows.scale(x, norm.weight)

    def normed(self, rows: ScaledRows, norm: RMSNorm) -> ScaledRows:
        """As `Form`."""
        return rows

    def project(self, rows: ScaledRows, norm: RMSNorm, linear: Linear, *, gated: bool = False) -> Tensor:
        """As `Form`; the rows were scaled by the weight of that norm."""
        adapted = adapted_by(self.adapters, linear.name)
        return scaled_rows.project(rows, linear.matrix, linear.bias, norm.eps, gated=gated, adapted=adapted)

    def add(self, rows: ScaledRows, linear: Linear, x: Tensor, next_norm: RMSNorm) -> ScaledRows:
        """As `Form`; `rows` are overwritten."""
        adapted = adapted_by(self.adapters, linear.name)
        return scaled_rows.add_projected(rows, x, linear.matrix, linear.bias, next_norm.weight, adapted)

    def stream(self, rows: ScaledRows) -> Tensor:
        """As `Form`."""
        return rows.rows

    def end(self, rows: ScaledRows, norm: RMSNorm) -> Tensor:
        """As `Form`."""
        return norm(rows.rows)
