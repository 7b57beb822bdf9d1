"""Memory for a module's weights: allocated by torch, or by the caller that places the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from ostinato.kernels.allocation import Allocate, allocated


@dataclass(frozen=True)
class Room:
    """Where the weights of one module are allocated."""

    device: torch.device
    dtype: torch.dtype
    allocate: Allocate | None = None
    """None: torch allocates."""
    module: str = ""
    """The module's name in `named_modules`."""

    def of(self, name: str) -> Room:
        """The room of a submodule."""
        return replace(self, module=f"{self.module}.{name}" if self.module else name)

    def parameter(self, name: str, *shape: int) -> nn.Parameter:
        """A weight without gradient, not yet filled."""
        if self.allocate is None:
            tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        else:
            tensor = allocated(self.allocate, shape, self.dtype, self.device, f"{self.module}.{name}")
        return nn.Parameter(tensor, requires_grad=False)
