"""The learning rates of an optimizer's groups, on the device, where graphs read them."""

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch

from ..errors import ConfigError
from .user_flags import UserFlags


class Rates:
    """One rate for each group, which replaces the number in the group."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, users: UserFlags, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._optimizer, self._users = optimizer, users
        self.tensors = [torch.zeros((), dtype=dtype, device=device) for _ in optimizer.param_groups]
        self._values: list[float | None] = [None] * len(self.tensors)
        users.of_steps += self.tensors

    @property
    def is_of_all_groups(self) -> bool:
        """Whether no group was added since."""
        return len(self._groups) == len(self.tensors)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def refuse_new_groups(self) -> None:
        """Raises ConfigError if there are more groups than rates."""
        if not self.is_of_all_groups:
            raise ConfigError("a parameter group was added: make a new step")

    def take(self) -> None:
        """Take the groups' rates, or those of the tensors once given there."""
        for number, group in enumerate(self._groups):
            self._take(number, group)

    def _take(self, number: int, group: dict[str, Any]) -> None:
        rate, own, users = group.get("lr"), self.tensors[number], self._users
        if rate is None:  # the optimizer determines its own
            return
        if rate is not own:
            with torch.no_grad():
                own.fill_(rate)
            if not isinstance(rate, torch.Tensor):
                users.rates[number] = float(rate)
                users.rate_tensors.pop(number, None)
            elif not any(rate is tensor for tensor in users.of_steps):
                users.rate_tensors[number] = rate, rate._version
        given, version = users.rate_tensors.get(number, (own, own._version))
        if given._version != version:  # the user may continue to write to a given tensor
            with torch.no_grad():
                own.fill_(given)
            users.rate_tensors[number] = given, given._version
        group["lr"] = own
        self._values[number] = None

    def set(self, wanted: float | Sequence[float], *, on_device: bool) -> None:
        """Take a schedule's rates. `on_device`: otherwise the groups get the numbers."""
        is_one = isinstance(wanted, str) or not isinstance(wanted, Sequence)
        values: list[Any] = [wanted] * len(self._groups) if is_one else list(wanted)  # type: ignore[arg-type]
        if len(values) != len(self._groups):
            raise ConfigError(
                f"the schedule gave {len(values)} learning rates for {len(self._groups)} groups"
            )
        if wrong := [value for value in values if not isinstance(value, Real | torch.Tensor)]:
            raise ConfigError(f"the schedule gave {wrong[0]!r}, which is not a learning rate")
        for number, value in enumerate(values):
            self._groups[number]["lr"] = self.tensors[number] if on_device else value
            if value != self._values[number]:
                self.tensors[number].fill_(value)
                self._values[number] = value
                self._users.rates[number] = float(value)

    def give_back(self) -> None:
        """Restore what the user gave to the groups, for an optimizer that is not captured."""
        for number, group in enumerate(self._groups):
            given = self._users.rate_tensors.get(number)
            if group.get("lr") is None:
                continue
            group["lr"] = self._users.rate(number, group["lr"]) if given is None else given[0]
