"""The flags that an optimizer had before any training step set its own."""

from typing import Any
from weakref import WeakKeyDictionary

import torch

_OURS = ("capturable", "fused", "foreach")
"""What we set in a parameter group, besides the learning rate."""


class UserFlags:
    """Flags of one optimizer, shared by all steps that use it: a second step must not take the first one's
    flags for the user's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.of_groups: list[dict[str, Any]] = []
        self.rates: dict[int, float] = {}
        """Each group's learning rate as given, by the group's number: on the device it may be rounded."""
        self.rate_tensors: dict[int, tuple[torch.Tensor, int]] = {}
        """For rates given as tensors: the tensor, and its version when last read."""
        self.of_steps: list[torch.Tensor] = []
        """Learning rates that steps have put there."""
        self._note(optimizer)
        # Registered before the hooks of steps, which set theirs again.
        optimizer.register_load_state_dict_post_hook(self._note)
        optimizer.register_state_dict_post_hook(self._as_the_user_knows_it)

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> "UserFlags":
        """The flags of an optimizer."""
        if optimizer not in _known:
            _known[optimizer] = cls(optimizer)
        known = _known[optimizer]
        known.of_groups += map(_flags, optimizer.param_groups[len(known.of_groups) :])  # added since
        return known

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        self.of_groups = [*map(_flags, optimizer.param_groups)]

    def _as_the_user_knows_it(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        """Give a checkpoint plain numbers and the user's own flags, so that it can be loaded anywhere."""
        for number, (group, flags) in enumerate(zip(saved["param_groups"], self.of_groups, strict=False)):
            group.update(flags)
            if group.get("lr") is not None:
                group["lr"] = self.rate(number, group["lr"])

    def rate(self, number: int, rate: float | torch.Tensor) -> float:
        """The rate as given, as a number, unless another one was written to the device since."""
        given, found = self.rates.get(number), float(rate)
        if given is not None and isinstance(rate, torch.Tensor):
            return given if float(torch.tensor(given, dtype=rate.dtype, device="cpu")) == found else found
        return found


def _flags(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in _OURS if name in group}


_known: WeakKeyDictionary[torch.optim.Optimizer, UserFlags] = WeakKeyDictionary()
