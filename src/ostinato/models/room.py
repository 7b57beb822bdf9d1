"""Room for a module's weights: made by torch, or by whoever places the model in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from ostinato.kernels.allocation import Allocate, allocated


@dataclass(frozen=True)
class Room:
    """Where the weights of one module go."""

    device: torch.device
    dtype: torch.dtype
    allocate: Allocate | None = None
    """None: torch."""
    module: str = ""
    """Whose room it is, as `named_modules` calls it."""

    def of(self, name: str) -> Room:
        """That of a module inside."""
        return replace(self, module=f"{self.module}.{name}" if self.module else name)

    def parameter(self, name: str, *shape: int) -> nn.Parameter:
        """A weight without gradient, not yet filled."""
        if self.allocate is None:
            tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        else:
            tensor = allocated(self.allocate, shape, self.dtype, self.device, f"{self.module}.{name}")
        return nn.Parameter(tensor, requires_grad=False)
