"""What callers set for tensors of their own, and those of an engine must not follow: `torch.inference_mode`,
`torch.autocast`, a default device. Graphs would round as under autocast for ever, and what was made under
inference mode could not be written outside of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_TYPES = ("cpu", "cuda")


def left() -> ExitStack | None:
    """Leave them, until the stack is closed; None if there is nothing to leave, which is found out fast."""
    casting = [name for name in _TYPES if torch.is_autocast_enabled(name)]
    has_modes = torch._C._len_torch_function_stack() > 0
    if not (casting or has_modes or torch.is_inference_mode_enabled()):
        return None
    stack = ExitStack()
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))
    for name in casting:
        stack.enter_context(torch.autocast(name, enabled=False))
    if has_modes and torch.get_default_device().type != "cpu":
        stack.enter_context(torch.device("cpu"))
    return stack


@contextmanager
def without_surroundings() -> Iterator[None]:
    """A context, or decorator, in which they are left."""
    with left() or ExitStack():
        yield
