"""Detects transforms and tracers that follow single operations, which a replay would hide from them."""

import torch
from torch.autograd import forward_ad


def inside_transform() -> bool:
    """Whether a transform of `torch.func`, forward-mode differentiation, a tracer or a dispatch mode is
    active: a graph would be a constant to it."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )
