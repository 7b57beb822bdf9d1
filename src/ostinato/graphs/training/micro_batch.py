"""One micro-batch of a training step: everything that a graph records."""

from collections.abc import Mapping
from enum import StrEnum

import torch

from ..backends import Backend
from .batches import BatchKind
from .gradients import Gradients
from .loss import Loss
from .optimizers import StaticOptimizer
from .update import Update


class Kind(StrEnum):
    """What a graph does with the gradients of a micro-batch."""

    ACCUMULATE = "accumulate"
    UPDATE = "update"
    JUDGE = "judge"  # an update without the optimizer's step, see Note [Updates behind the graph]


class MicroBatch:
    """Forward, loss and backward, and with the last one of `accumulate` the update."""

    def __init__(
        self,
        loss: Loss,
        gradients: Gradients,
        update: Update,
        optimizer: StaticOptimizer,
        backend: Backend,
        accumulate: int,
    ) -> None:
        self._loss, self._plain = loss, loss.uncompiled() if loss.is_compiled else loss
        self._gradients, self._update, self._optimizer = gradients, update, optimizer
        self._backend, self._accumulate = backend, accumulate

    def __call__(
        self, kind: BatchKind, tensors: Mapping[str, torch.Tensor], does: Kind, *, is_rung: bool
    ) -> torch.Tensor:
        """The loss. `is_rung`: other lengths are not worth compiling."""
        loss_of = self._loss if is_rung else self._plain
        with torch.enable_grad():
            loss = loss_of(*kind.arguments(tensors), kind.mask(tensors))
            share = loss / self._accumulate if self._accumulate > 1 else loss
            self._gradients.backward(self._update.scaled(share))
        if does is Kind.UPDATE:
            if not self._optimizer.has_stepped:
                # Otherwise its state would land in large segments of activations, and hold them forever.
                self._backend.release_unused()
            self._update()
        elif does is Kind.JUDGE:
            self._update.judge()
        if self._gradients.is_trial:
            self._gradients.forget_passing()
        return loss.detach()

    @property
    def kinds(self) -> list[Kind]:
        """What graphs do; the last one ends an update."""
        behind = self._optimizer.has_stepped and self._optimizer.why_behind is not None
        ends = Kind.JUDGE if behind else Kind.UPDATE
        return [ends] if self._accumulate == 1 else [Kind.ACCUMULATE, ends]
