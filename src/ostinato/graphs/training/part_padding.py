"""Whether rows of a part can be padded: none may depend on another, or on how many there are."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..capturing.trial import Trials
from ..dispatching.descriptor import BatchDescriptor, BatchShape
from ..inputs.buffers import Batch, InputBuffers
from ..inputs.fields import Field
from ..trees import flatten
from ..trimming import same_constant
from ..wrapping.signature import Examples
from .padding import evaluating


def with_poison(field: Field, sample: torch.Tensor) -> Field:
    """Integers may be indices: another legal one is what was seen."""
    is_number = field.dtype.is_floating_point or field.dtype.is_complex or field.dtype is torch.bool
    return field if is_number or not sample.numel() else replace(field, poison=int(sample.max()))


@dataclass(frozen=True)
class RowTrial:
    """Tries half of the rows, with others as padding."""

    call: Callable[[Batch], Any]
    buffers: InputBuffers
    examples: Examples
    modules: list[torch.nn.Module]
    rung: int

    def is_alike(self, trials: Trials) -> bool:
        """Whether real rows are the same whatever padding holds, and, dropout aside, without it."""
        one, other = trials.run(self._padded), trials.run(lambda: self._padded(poison=True))
        return _same(one, other) and bool(trials.run(self._is_same_unpadded))

    def _padded(self, *, poison: bool = False) -> list[Any]:
        shape, descriptor = BatchShape.decode(self.rung // 2), BatchDescriptor.decode(self.rung)
        self.buffers.fill(self._half(), shape, descriptor, poison=poison)
        leaves = self._leaves_of(self.buffers.views(descriptor))
        return [self._first_half(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def _is_same_unpadded(self) -> bool:
        half = {name: tensor.to(self.buffers.device) for name, tensor in self._half().items()}
        with evaluating(self.modules):
            padded, again = self._padded(), self._padded()
            try:
                alone = self._leaves_of(half)
            except Exception:  # it knows one number of rows, say
                return False
        draws = not _same(padded, again)
        return _same(padded, alone, in_value=not draws)

    def _half(self) -> Batch:
        return self.examples.dummy(BatchDescriptor.decode(self.rung // 2))

    def _leaves_of(self, inputs: Batch) -> list[Any]:
        with torch.no_grad():
            return flatten(self.call(inputs))[0]

    def _first_half(self, leaf: torch.Tensor) -> torch.Tensor:
        has_rows = leaf.dim() > 0 and leaf.size(0) == self.rung
        return (leaf[: self.rung // 2] if has_rows else leaf).clone()


def _same(ones: list[Any], others: list[Any], *, in_value: bool = True) -> bool:
    for one, other in zip(ones, others, strict=True):
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
            is_same = same_constant(one, other)
        elif in_value and one.shape == other.shape:
            is_same = torch.allclose(one, other, rtol=1e-3, atol=1e-4, equal_nan=True)
        else:
            is_same = one.shape == other.shape
        if not is_same:
            return False
    return True
