"""The form of very few tokens on a GPU: norm, gate and sum are parts of the linear layers."""

from torch import Tensor

from ostinato.kernels.linear import few_tokens
from ostinato.kernels.linear.weight import PLAIN

from ..layers import Linear, RMSNorm
from .form import Form, Step


class Few(Form[Tensor]):
    """Rows are what they are. A product never leaves its kernel before gate and sum: no adapters."""

    name = "few"
    keeps_input = True
    # Results written to what all multiprocessors have just read cost 2.5% of a step of one token.
    keeps_projected = True

    def why_not(self, step: Step) -> str | None:
        """As `Form`."""
        if step.has_adapters:
            return "its kernels gate and add products themselves, so that no adapter can change them before"
        if step.formats != {PLAIN}:
            return f"its kernels take plain weights, not {', '.join(sorted(step.formats))}"
        if not few_tokens.are_the_choice(step.shapes, step.num_tokens, step.dtype, step.device):
            return "fused kernels are not the choice for all matrices of a layer"
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
            rows, linear.matrix, linear.bias, norm_weight=norm.weight, eps=norm.eps, gated=gated
        )

    def add(self, rows: Tensor, linear: Linear, x: Tensor, next_norm: RMSNorm) -> Tensor:
        """As `Form`."""
        return few_tokens.project(x, linear.matrix, linear.bias, residual=rows)

    def end(self, rows: Tensor, norm: RMSNorm) -> Tensor:
        """As `Form`."""
        return norm(rows)
