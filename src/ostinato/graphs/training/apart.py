"""Model and loss function tried separately, with padding and without.

Note [Terms that are small at first]
A single number for both hardly shows a term that begins small: the distance to a reference model that starts
out equal, or a bonus for entropy. So the loss function is given the model's outputs with padded positions,
and those of real positions alone, which are the same numbers: loss and gradients are then equal up to
rounding, unless padding counts. The outputs are moved to each other's places, so that they differ from a
reference's outputs there; each is one that the model did produce, and valid for the loss function.

Note [Results that are zero at first]
A count of hits, or an accuracy, is zero before anything is learnt, and zero with padding as well as without.
So where the targets are classes, the loss function is also given those that the model predicts.

Note [Memory of trials]
A language model's outputs are often most of what a step holds. A trial keeps as little of them as possible,
because a step that fits without graphs must also fit while it is tried: no autograd graph is kept longer than
needed, and no copy is made in a wider type.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..checking.differences import difference, difference_as_a_whole
from ..trees import Structure, flatten, map_tensors
from .batches import LENGTH_DIM, BatchKind
from .loss import Loss

_OF_MODELS = {torch.float64: 1e-6, torch.float32: 1e-3}
_OF_LOSSES = {torch.float64: 1e-8, torch.float32: 1e-4}
"""For another order of additions, by the types of the computation; those with fewer bits are below."""
_OF_MODELS_WITH_FEWER_BITS, _OF_LOSSES_WITH_FEWER_BITS = 3e-2, 1e-3
_NOTHING = 1e-7
"""What masks leave of padding, relative to the other gradients."""


class ModelAndLoss:
    """Both, tried on one batch, padded and not."""

    def __init__(
        self,
        loss: Loss,
        kind: BatchKind,
        padded: Mapping[str, torch.Tensor],
        alone: Mapping[str, torch.Tensor],
        lengths: tuple[int, int],
        *,
        has_results: bool,
    ) -> None:
        """`lengths`: the padded one, and that of real positions. `has_results`: the loss function returns
        more than the loss."""
        self._loss, self._lengths, self._has_results = loss, lengths, has_results
        types = loss.types()
        self._of_models = max(_OF_MODELS.get(dtype, _OF_MODELS_WITH_FEWER_BITS) for dtype in types)
        self._of_losses = max(_OF_LOSSES.get(dtype, _OF_LOSSES_WITH_FEWER_BITS) for dtype in types)
        self._padded, self._alone = _Given.of(kind, padded), _Given.of(kind, alone)

    def why_not_padded(self) -> str | None:
        """What padding changes, or None."""
        leaves, structure = self._said_of(self._padded)
        alone = self._said_of(self._alone)[0]
        if not all(_close(self._first(a), b, self._of_models) for a, b in zip(leaves, alone, strict=True)):
            return "what the model returns depends on the length"
        del alone  # see Note [Memory of trials]
        mixed = [self._mixed(leaf) for leaf in leaves]
        del leaves
        short = [self._first(leaf) for leaf in mixed]
        try:
            again = self._loss_of(structure.filled(mixed), self._padded)
            one = _seen(self._loss, structure.filled, mixed, self._padded)
            other = _seen(self._loss, structure.filled, short, self._alone)
        except Exception as error:  # its arguments may not fit what the model has stored elsewhere
            return self._cannot_try(f"it fails alone with {type(error).__name__}")
        if not torch.equal(one.loss, again):
            return self._cannot_try("it draws random numbers")
        if difference(one.loss, other.loss, floor=_NOTHING * 10 / self._of_losses) > self._of_losses:
            return f"the loss function alone gives {other.loss:.8g} without padding, {one.loss:.8g} with it"
        if not all(map(self._is_same_gradient, one.gradients, other.gradients)):
            return "gradients of the loss function alone depend on padding"
        return self._why_results_differ(structure, mixed, short, one, other)

    def _cannot_try(self, why: str) -> str | None:
        return (
            f"what the loss function returns besides could not be tried: {why}" if self._has_results else None
        )

    def _why_results_differ(
        self, structure: Structure, mixed: list[Any], short: list[Any], one: "_Seen", other: "_Seen"
    ) -> str | None:
        """See Note [Results that are zero at first]."""
        if not self._has_results:
            return None
        if self._lengths[1] == 1:
            return self._cannot_try("the first batch is too short")
        differs, silent = self._compared(one, other)
        if differs or not silent:
            return differs
        padded, alone = (
            _seen(self._loss, structure.filled, leaves, given._replace(targets=_hit(leaves, given.targets)))
            for leaves, given in ((mixed, self._padded), (short, self._alone))
        )
        differs, still_silent = self._compared(padded, alone)
        for name in silent & still_silent:
            return f"{name} of the loss function is zero with the first batch, so padding could not be tried"
        return differs

    def _compared(self, one: "_Seen", other: "_Seen") -> tuple[str | None, set[str]]:
        """Which result differs with padding, and the names of numbers that are zero in any case."""
        silent = set()
        for (name, padded), (_, alone) in zip(one.results, other.results, strict=True):
            if not isinstance(padded, torch.Tensor):
                continue
            real = self._first(padded)
            if real is padded and not padded.any():
                silent.add(name)
            if difference(real, alone, floor=_NOTHING * 10 / self._of_losses) > self._of_losses:
                shown = (
                    f"is {alone:.6g} without padding and {padded:.6g} with it"
                    if padded.dim() == 0
                    else "has other values or another shape with padding"
                )
                return f"{name} of the loss function {shown}", silent
        return None, silent

    def _said_of(self, given: "_Given") -> tuple[list[Any], Structure]:
        with torch.enable_grad():  # for models that differentiate
            leaves, structure = flatten(self._loss.outputs(given.inputs))
        return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure

    def _loss_of(self, outputs: Any, given: "_Given") -> torch.Tensor:
        copied = map_tensors(torch.Tensor.clone, outputs)  # since it may be changed in place
        with torch.enable_grad():
            return self._loss.of_outputs(copied, given.targets, given.mask).loss.detach()

    def _first(self, leaf: Any) -> Any:
        """Real positions only."""
        padded, real = self._lengths
        has_length = isinstance(leaf, torch.Tensor) and leaf.dim() > LENGTH_DIM
        return leaf.narrow(LENGTH_DIM, 0, real) if has_length and leaf.size(LENGTH_DIM) == padded else leaf

    def _mixed(self, leaf: Any) -> Any:
        """Outputs of real positions, moved to other positions and rows, and into padding."""
        real = self._first(leaf)
        if real is leaf or not leaf.is_floating_point():
            return leaf
        length, all_positions = real.size(LENGTH_DIM), leaf.size(LENGTH_DIM)
        places = torch.arange(1, length + 1, device=leaf.device) % length
        moved = real.detach().index_select(LENGTH_DIM, places).roll(1, 0)
        # Not in turn: whatever is averaged or taken from the end must show.
        padding = real.detach().narrow(LENGTH_DIM, min(1, length - 1), 1)
        return torch.cat([moved, *[padding] * (all_positions - length)], LENGTH_DIM)

    def _is_same_gradient(self, one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
        if one is None or other is None:
            return one is other
        real = self._first(one)
        if real is not one:
            length = real.size(LENGTH_DIM)
            of_padding = one.narrow(LENGTH_DIM, length, one.size(LENGTH_DIM) - length)
            if not bool(_norm(of_padding) <= _NOTHING * _norm(one)):
                return False
        return real.shape != other.shape or difference_as_a_whole(real, other) <= self._of_losses


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
    results: list[tuple[str, Any]]


def _seen(loss: Loss, filled: Callable[[list[Any]], Any], leaves: list[Any], given: _Given) -> _Seen:
    """The loss of these outputs, and its gradients."""
    wanted: list[torch.Tensor] = []

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not leaf.is_floating_point():
            return leaf.clone()
        wanted.append(leaf.detach().requires_grad_())
        return wanted[-1].clone()  # since it may be changed in place

    with torch.enable_grad():
        returned = loss.of_outputs(filled([*map(own, leaves)]), given.targets, given.mask)
        gradients = torch.autograd.grad(returned.loss, wanted, allow_unused=True)
    results = [(name, _detached(leaf)) for name, leaf in returned.results]
    return _Seen(returned.loss.detach(), list(gradients), results)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _hit(leaves: list[Any], targets: Any) -> Any:
    """The targets, where they are classes, replaced by those that the outputs predict."""

    def predicted(target: torch.Tensor) -> torch.Tensor:
        for leaf in leaves:
            fits = isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dim() > target.dim()
            if fits and not target.is_floating_point() and leaf.shape[: target.dim()] == target.shape:
                classes = leaf.flatten(target.dim()).argmax(-1)
                return torch.where(target < 0, target, classes.to(target.dtype))
        return target

    return map_tensors(predicted, targets)


def _close(one: Any, other: Any, tolerance: float) -> bool:
    """Other leaves, and different shapes, count as close."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return True
    if one.shape != other.shape or not one.is_floating_point():
        return True
    return difference(one, other) <= tolerance


def _norm(values: torch.Tensor) -> torch.Tensor:
    """Summed in float64, without a float64 copy."""
    return torch.linalg.vector_norm(values, dtype=torch.float64)
