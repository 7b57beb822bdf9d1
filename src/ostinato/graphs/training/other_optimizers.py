"""Optimizers that step while gradients are computed: in parameter hooks, say, that free each gradient at
once.

Their learning rates and counts are Python's, and trial runs would create state and take steps for good.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import CaptureError


@contextmanager
def refused(
    trained: Callable[[], Collection[torch.Tensor]], *, but: torch.optim.Optimizer | None = None
) -> Iterator[None]:
    """Raises CaptureError before another optimizer steps one of these parameters."""

    def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is but:
            return
        known = set(trained())
        if any(parameter in known for group in optimizer.param_groups for parameter in group["params"]):
            raise CaptureError(
                f"another optimizer ({type(optimizer).__name__}) steps inside the training step, for "
                f"example in a gradient hook, and a graph would repeat one step of it forever: step it "
                f"after ours, or give all parameters to one optimizer"
            )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
