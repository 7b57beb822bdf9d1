"""One micro-batch of a training step: everything that a graph records."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import torch

from ..backends import Backend
from ..capturing.gate import is_recording
from ..memory import storage_address
from .batches import BatchKind
from .gradients import Gradients
from .loss import Loss, Returned
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
    ) -> Any:
        """What the loss function returns. `is_rung`: other lengths are not worth compiling."""
        loss_of = self._loss if is_rung else self._plain
        with torch.enable_grad():
            returned = loss_of.returned(*kind.arguments(tensors), kind.mask(tensors))
            loss, result = returned.loss, self._handed_out(returned, tensors)
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
        return result

    def _handed_out(self, returned: Returned, tensors: Mapping[str, torch.Tensor]) -> Any:
        """A result that is a parameter, a buffer or an argument is as the loss function found it, whatever an
        update or the next batch makes of it."""
        if isinstance(returned.whole, torch.Tensor):
            return returned.loss.detach()
        modules = self._loss.modules
        lasting = [t for m in modules for t in (*m.parameters(), *m.buffers())] + [*tensors.values()]
        addresses = set(map(storage_address, lasting))
        is_own = is_recording()  # and copied by whoever hands it out
        return returned.handed_out(
            lambda t: t if is_own and storage_address(t) not in addresses else t.clone()
        )

    @property
    def kinds(self) -> list[Kind]:
        """What graphs do; the last one ends an update."""
        behind = self._optimizer.has_stepped and self._optimizer.why_behind is not None
        ends = Kind.JUDGE if behind else Kind.UPDATE
        return [ends] if self._accumulate == 1 else [Kind.ACCUMULATE, ends]
