"""torch.compile for small rungs, where fused kernels pay most."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..dispatching.keys import GraphKey
from ..dispatching.mode import GraphMode
from ..errors import ConfigError


def make_room(versions: int) -> None:
    """For so many compiled versions of a function; beyond the limit dynamo would fall back silently."""
    import torch._dynamo

    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, versions + 8)


class CompiledSteps:
    """Chooses per rung between a step and its compiled form."""

    def __init__(self, step: Callable[..., Any], up_to: int, device: torch.device) -> None:
        if up_to < 0:
            raise ConfigError(f"compile_up_to must be 0 or more, not {up_to}")
        if up_to and device.type != "cuda":
            raise ConfigError(
                "compile_up_to needs a CUDA device: torch.compile is inactive while the tape records"
            )
        self._step = step
        self._up_to = up_to
        self._compiled = torch.compile(step, dynamic=False) if up_to else step

    def reserve(self, keys: Sequence[GraphKey]) -> None:
        """Make room for one compiled version per rung."""
        wanted = sum(self.applies(key) for key in keys)
        if wanted:
            make_room(wanted)

    def for_key(self, key: GraphKey) -> Callable[..., Any]:
        """What to warm up and capture for this key."""
        return self._compiled if self.applies(key) else self._step

    def applies(self, key: GraphKey) -> bool:
        """Whether this rung is compiled. A piecewise one is not: recording stops inside of it."""
        return key.mode is GraphMode.FULL and key.descriptor.num_tokens <= self._up_to
