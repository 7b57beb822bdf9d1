"""Detects transforms and tracers that follow single operations, which a replay would hide from them."""

import sys

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext


def inside_transform() -> bool:
    """Whether a transform of `torch.func`, forward-mode differentiation, a tracer, a dispatch mode or a
    function mode is active: a graph would be a constant to it. `with torch.device(...)` and
    `torch.set_default_device` are function modes, too, but do nothing to tensors that are there."""
    return (
        _num_dispatch_modes() > 0
        or _transform() is not None
        or forward_ad._current_level >= 0
        or _tracer() is not None
        or ((depth := _num_function_modes()) > 0 and _is_function_mode(depth))
    )


def _is_function_mode(depth: int) -> bool:
    modes = map(torch._C._get_function_stack_at, range(depth))
    return any(type(mode) is not DeviceContext for mode in modes)


_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_num_function_modes = torch._C._len_torch_function_stack
_transform, _tracer = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state


def has_replaced_parameters() -> bool:
    """Whether `torch.func.functional_call` is calling, which puts other tensors in the places of parameters
    meanwhile. It leaves no other sign, so the caller's frames are searched: ask only where places differ."""
    return _is_called_from("torch.nn.utils.stateless")


def is_differentiated_by_torch() -> bool:
    """Whether `torch.autograd.functional` (`jacobian`, `hessian`, `vjp`) is calling, which will differentiate
    the result by the arguments. Searches the caller's frames: ask only where an argument needs a gradient."""
    return _is_called_from("torch.autograd.functional")


def _is_called_from(module: str) -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
