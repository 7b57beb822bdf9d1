"""The form of very few tokens on a GPU: norm, gate and sum are parts of the linear layers."""

from dataclasses import dataclass

from torch import Tensor

from ostinato.kernels.linear import few_tokens
from ostinato.kernels.linear.weight import PLAIN
from ostinato.kernels.lora import Adapters, adapted_by

from ..layers import Linear, RMSNorm
from .form import Form, Step


@dataclass(frozen=True, eq=False)
class Few(Form[Tensor]):
    """Rows are plain hidden states. Kernels store products only after gate and sum: adapters add inside."""

    adapters: Adapters | None = None

    name = "few"
    keeps_input = True
    # Writing results to memory that all multiprocessors have just read costs 2.5% of a step of one token.
    keeps_projected = True

    def why_not(self, step: Step) -> str | None:
        """As `Form`."""
        if step.formats != {PLAIN}:
            return f"its kernels take plain weights, not {', '.join(sorted(step.formats))}"
        if not few_tokens.are_the_choice(step.shapes, step.num_tokens, step.dtype, step.device):
            return "fused kernels are not chosen for all matrices of a layer"
        return None

    def begin(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """As `Form`."""
        return x

    def normed(self, rows: Tensor, norm: RMSNorm) -> Tensor:
        """As `Form`."""
        return rows

    def project(self, rows: Tensor, norm: RMSNorm, linear: Linear, *, gated: bool = False) -> Tensor:
        """As `Form`."""
        return few_tokens.project(
            rows,
            linear.matrix,
            linear.bias,
            norm_weight=norm.weight,
            eps=norm.eps,
            gated=gated,
            adapted=adapted_by(self.adapters, linear.name),
        )

    def add(self, rows: Tensor, linear: Linear, x: Tensor, next_norm: RMSNorm) -> Tensor:
        """As `Form`."""
        adapted = adapted_by(self.adapters, linear.name)
        return few_tokens.project(x, linear.matrix, linear.bias, residual=rows, adapted=adapted)

    def stream(self, rows: Tensor) -> Tensor:
        """As `Form`."""
        return rows

    def end(self, rows: Tensor, norm: RMSNorm) -> Tensor:
        """As `Form`."""
        return norm(rows)
