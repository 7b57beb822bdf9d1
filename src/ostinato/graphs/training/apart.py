"""Model and loss function apart, with padding and without.

Note [Terms that are small at first]
One number for both shows little of a term that begins small: of the distance to a reference model that begins
as the same one, of a bonus for entropy. So the loss function is given what the model says of padded
positions, and what it says of real ones alone, which are the same numbers: the loss and its gradients are
then the same but for rounding, or padding counts. The model's words stand at one another's places, so that
they are not what a reference says of these; each is one that the model did say, and legal for the loss
function.

Note [Memory of trials]
What a language model says is often most of what a step holds. A trial keeps as little of it as it can, since
a step that fits without graphs must fit while it is tried: no graph of autograd longer than it is needed, no
copy in a wider type.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..trees import Structure, flatten, map_tensors
from .batches import LENGTH_DIM, BatchKind
from .loss import Loss

_OF_MODELS = {torch.float64: 1e-6, torch.float32: 1e-3}
_OF_LOSSES = {torch.float64: 1e-8, torch.float32: 1e-4}
"""By another order of additions, in the types that they compute in; with fewer bits, see there."""
_OF_MODELS_WITH_FEWER_BITS, _OF_LOSSES_WITH_FEWER_BITS = 3e-2, 1e-3
_NOTHING = 1e-7
"""What masks leave of padding, beside gradients of the rest."""


class ModelAndLoss:
    """Tried on one batch, padded and not."""

    def __init__(
        self,
        loss: Loss,
        kind: BatchKind,
        padded: Mapping[str, torch.Tensor],
        alone: Mapping[str, torch.Tensor],
        lengths: tuple[int, int],
    ) -> None:
        """`lengths`: the padded one, and that of real positions."""
        self._loss, self._lengths = loss, lengths
        types = loss.types()
        self._of_models = max(_OF_MODELS.get(dtype, _OF_MODELS_WITH_FEWER_BITS) for dtype in types)
        self._of_losses = max(_OF_LOSSES.get(dtype, _OF_LOSSES_WITH_FEWER_BITS) for dtype in types)
        self._padded, self._alone = _Given.of(kind, padded), _Given.of(kind, alone)

    def why_not_padded(self) -> str | None:
        """What padding changes, if it changes something."""
        leaves, structure = self._said_of(self._padded)
        alone = self._said_of(self._alone)[0]
        if not all(_close(self._first(a), b, self._of_models) for a, b in zip(leaves, alone, strict=True)):
            return "what the model says depends on the length"
        del alone  # see Note [Memory of trials]
        mixed = [self._mixed(leaf) for leaf in leaves]
        del leaves
        short = [self._first(leaf) for leaf in mixed]
        try:
            again = self._loss_of(structure.filled(mixed), self._padded)
            one = _seen(self._loss, structure.filled, mixed, self._padded)
            other = _seen(self._loss, structure.filled, short, self._alone)
        except Exception:  # it is given what it must not be: what the model has left elsewhere, say
            return None
        if not torch.equal(one.loss, again):  # it draws
            return None
        if not _close(one.loss, other.loss, self._of_losses, _NOTHING * 10):
            return f"the loss function alone gives {other.loss:.8g} without padding, with it {one.loss:.8g}"
        if not all(map(self._is_same_gradient, one.gradients, other.gradients)):
            return "gradients of the loss function alone depend on padding"
        return None

    def _said_of(self, given: "_Given") -> tuple[list[Any], Structure]:
        with torch.enable_grad():  # for models that differentiate
            leaves, structure = flatten(self._loss.outputs(given.inputs))
        return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure

    def _loss_of(self, outputs: Any, given: "_Given") -> torch.Tensor:
        copied = map_tensors(torch.Tensor.clone, outputs)  # which may be changed in place
        with torch.enable_grad():
            return self._loss.of_outputs(copied, given.targets, given.mask).detach()

    def _first(self, leaf: Any) -> Any:
        """Real positions."""
        padded, real = self._lengths
        has_length = isinstance(leaf, torch.Tensor) and leaf.dim() > LENGTH_DIM
        return leaf.narrow(LENGTH_DIM, 0, real) if has_length and leaf.size(LENGTH_DIM) == padded else leaf

    def _mixed(self, leaf: Any) -> Any:
        """What was said of real positions, at other ones, in other rows, and of padding."""
        real = self._first(leaf)
        if real is leaf or not leaf.is_floating_point():
            return leaf
        places = torch.arange(1, leaf.size(LENGTH_DIM) + 1, device=leaf.device) % real.size(LENGTH_DIM)
        return real.detach().index_select(LENGTH_DIM, places).roll(1, 0)

    def _is_same_gradient(self, one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
        if one is None or other is None:
            return one is other
        real = self._first(one)
        if real is not one:
            length = real.size(LENGTH_DIM)
            of_padding = one.narrow(LENGTH_DIM, length, one.size(LENGTH_DIM) - length)
            if not bool(_norm(of_padding) <= _NOTHING * _norm(one)):
                return False
        return _close(real, other, self._of_losses)


class _Given(NamedTuple):
    inputs: Any
    targets: Any
    mask: torch.Tensor | None

    @classmethod
    def of(cls, kind: BatchKind, tensors: Mapping[str, torch.Tensor]) -> "_Given":
        return cls(*kind.arguments(tensors), kind.mask(tensors))


class _Seen(NamedTuple):
    loss: torch.Tensor
    gradients: list[torch.Tensor | None]


def _seen(loss: Loss, filled: Callable[[list[Any]], Any], leaves: list[Any], given: _Given) -> _Seen:
    """The loss of these outputs, and its gradients."""
    wanted: list[torch.Tensor] = []

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not leaf.is_floating_point():
            return leaf.clone()
        wanted.append(leaf.detach().requires_grad_())
        return wanted[-1].clone()  # which may be changed in place

    with torch.enable_grad():
        value = loss.of_outputs(filled([*map(own, leaves)]), given.targets, given.mask)
        gradients = torch.autograd.grad(value, wanted, allow_unused=True)
    return _Seen(value.detach(), list(gradients))


def _close(one: Any, other: Any, tolerance: float, slack: float = 0.0) -> bool:
    """As a whole, not number by number; what is no floating tensor, or of another shape, tells nothing."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return True
    if one.shape != other.shape or not one.is_floating_point():
        return True
    difference, size = _norm(one - other), _norm(other)
    return bool(difference <= tolerance * size + slack) or not difference.isfinite()


def _norm(values: torch.Tensor) -> torch.Tensor:
    """Summed in float64, without a copy in it."""
    return torch.linalg.vector_norm(values, dtype=torch.float64)
