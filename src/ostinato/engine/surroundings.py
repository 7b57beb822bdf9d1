"""What callers set for their own tensors and an engine must not follow: `torch.inference_mode`,
`torch.autocast`, a default device. Graphs captured under autocast would round that way forever, and what is
made under inference mode cannot be written outside of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from ostinato.graphs.capturing.autocast import AutocastState


def left() -> ExitStack | None:
    """Leave them until the stack is closed; None if there is nothing to leave, which takes half a
    microsecond to find out: every step asks."""
    has_modes = torch._C._len_torch_function_stack() > 0
    is_inference = torch.is_inference_mode_enabled()
    if not (has_modes or is_inference or torch._C._is_any_autocast_enabled()):
        return None
    stack = ExitStack()
    if is_inference:
        stack.enter_context(torch.inference_mode(False))
    stack.enter_context(AutocastState(()).restored())
    if has_modes and torch.get_default_device().type != "cpu":
        stack.enter_context(torch.device("cpu"))
    return stack


@contextmanager
def without_surroundings() -> Iterator[None]:
    """A context, or decorator, in which they are left."""
    with left() or ExitStack():
        yield
