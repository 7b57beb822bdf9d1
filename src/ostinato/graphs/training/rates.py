"""The learning rates of an optimizer's groups, on the device, where graphs read them.

The groups keep what the user gave, a number or a tensor. Only while the optimizer's own code runs for a graph
do they hold these tensors instead.
"""

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch

from ..errors import ConfigError


class Rates:
    """One tensor for each group."""

    def __init__(self, optimizer: torch.optim.Optimizer, dtype: torch.dtype, device: torch.device) -> None:
        self._optimizer = optimizer
        self._tensors = [torch.zeros((), dtype=dtype, device=device) for _ in optimizer.param_groups]
        self._sent: list[float | None] = [None] * len(self._tensors)
        """The number that each tensor holds, as far as the host knows it."""

    @property
    def is_of_all_groups(self) -> bool:
        """Whether no group was added since."""
        return len(self._groups) == len(self._tensors)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def refuse_new_groups(self) -> None:
        """Raises ConfigError if there are more groups than rates."""
        if not self.is_of_all_groups:
            raise ConfigError("a parameter group was added: make a new step")

    def set(self, wanted: float | Sequence[float]) -> None:
        """Put a schedule's rates into the groups."""
        is_one = isinstance(wanted, str) or not isinstance(wanted, Sequence)
        values: list[Any] = [wanted] * len(self._groups) if is_one else list(wanted)  # type: ignore[arg-type]
        if len(values) != len(self._groups):
            raise ConfigError(
                f"the schedule gave {len(values)} learning rates for {len(self._groups)} groups"
            )
        if wrong := [value for value in values if not isinstance(value, Real | torch.Tensor)]:
            raise ConfigError(f"the schedule gave {wrong[0]!r}, which is not a learning rate")
        for group, value in zip(self._groups, values, strict=True):
            group["lr"] = value

    def send(self) -> None:
        """Bring the groups' rates to the device: numbers if they have changed since."""
        for number, (group, tensor) in enumerate(zip(self._groups, self._tensors, strict=True)):
            rate = group.get("lr")
            if rate is None:  # the optimizer determines its own
                continue
            if isinstance(rate, torch.Tensor) and rate.device == tensor.device:
                with torch.no_grad():  # always: who writes to it may leave no mark
                    tensor.copy_(rate.reshape(()))
                self._sent[number] = None
            elif (value := float(rate)) != self._sent[number]:
                tensor.fill_(value)
                self._sent[number] = value

    def in_place_of(self, groups: Sequence[dict[str, Any]]) -> list[torch.Tensor | None]:
        """What graphs read instead of these groups' rates; None where there is none."""
        return [
            None if group.get("lr") is None else tensor
            for group, tensor in zip(groups, self._tensors, strict=True)
        ]

    def holds(self, value: Any) -> bool:
        """Returns whether this is one of the tensors, or a view of one."""
        if not isinstance(value, torch.Tensor) or value.dim():
            return False
        return any(value.data_ptr() == tensor.data_ptr() for tensor in self._tensors)
