"""Whether rows of a part can be padded: none may depend on another, or on the number of rows."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..capturing.trial import Trials
from ..checking.differences import gross
from ..checking.fixed_draws import DrawsAreMixed, FixedDraws
from ..checking.trial_rows import dependence
from ..dispatching.descriptor import BatchDescriptor, BatchShape
from ..inputs.buffers import Batch, InputBuffers
from ..inputs.fields import Field
from ..journal import WriteJournal
from ..trees import flatten
from ..trimming import Trimmer
from ..wrapping.signature import Examples
from .padding import evaluating


def with_poison(field: Field, sample: torch.Tensor) -> Field:
    """Integers may be indices: poison them with another valid one, from the sample."""
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
    outputs: Trimmer
    """Learns here which rows of results are real."""

    def is_alike(self, trials: Trials) -> bool:
        """Whether real rows are the same whatever padding holds, and without padding; dropout is compared as
        if it drew equal numbers."""

        def same(one: list[Any], other: list[Any]) -> bool:
            return dependence([""] * len(one), one, other, allowed)[1] is None

        def allowed(dtype: torch.dtype) -> float:
            is_number = dtype.is_floating_point or dtype.is_complex
            return gross(dtype, self.buffers.device, journal) if is_number else 0.0

        try:
            self._learn(trials)
        except Exception:  # it may support only one number of rows, or return what follows their number
            return False
        journal = WriteJournal()  # trials that are given the state do not watch themselves
        trials.run(lambda: self._watched_by(journal))
        one, other = trials.run(self._padded), trials.run(lambda: self._padded(poison=True))
        if not same(one, other):
            return False
        with evaluating(self.modules):
            try:
                with FixedDraws() if journal.draws_random else nullcontext():
                    return same(trials.run(self._padded), trials.run(self._alone))
            except DrawsAreMixed:
                return self._shapes(trials.run(self._padded)) == self._shapes(trials.run(self._alone))
            except Exception:  # it may support only one number of rows
                return False

    def _learn(self, trials: Trials) -> None:
        """Raises CaptureError if padding cannot be cut off some result."""
        for rung in (self.rung, self.rung // 2):
            inputs = self._of(rung)
            output = trials.run(lambda inputs=inputs: self._output_of(inputs))  # type: ignore[misc]
            self.outputs.observe(BatchDescriptor.decode(rung), output)
        self.outputs.check()

    def _watched_by(self, journal: WriteJournal) -> None:
        with suppress(Exception), journal:  # code that must not be watched raises; real failures recur
            self._padded()

    @staticmethod
    def _shapes(leaves: list[Any]) -> list[Any]:
        return [leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in leaves]

    def _padded(self, *, poison: bool = False) -> list[Any]:
        shape, descriptor = BatchShape.decode(self.rung // 2), BatchDescriptor.decode(self.rung)
        self.buffers.fill(self._half(), shape, descriptor, poison=poison)
        leaves = flatten(self._output_of(self.buffers.views(descriptor)))[0]
        return [
            self.outputs.trim(position, leaf, shape).clone() if isinstance(leaf, torch.Tensor) else leaf
            for position, leaf in enumerate(leaves)
        ]

    def _alone(self) -> list[Any]:
        return flatten(self._output_of(self._of(self.rung // 2)))[0]

    def _of(self, rows: int) -> Batch:
        batch = self.examples.dummy(BatchDescriptor.decode(rows))
        return {name: tensor.to(self.buffers.device, copy=True) for name, tensor in batch.items()}

    def _half(self) -> Batch:
        return self.examples.dummy(BatchDescriptor.decode(self.rung // 2))

    def _output_of(self, inputs: Batch) -> Any:
        with torch.no_grad():
            return self.call(inputs)
