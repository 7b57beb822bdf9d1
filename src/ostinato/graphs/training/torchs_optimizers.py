"""What torch's optimizers need to be captured that they do not offer: names of theirs are replaced while they
step."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..replaced import replaced

_patching = threading.RLock()


@contextmanager
def capturable_on_a_cpu() -> Iterator[None]:
    """Capturable optimizers work on any device, but refuse a CPU unless they seem to be compiled."""
    with _patching, replaced(torch.compiler, "is_compiling", lambda: True):
        yield


@contextmanager
def counting_in_float64(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A capturable optimizer of torch creates counts in float64, also those of a parameter that is trained
    later, and computes rates in it.

    Counts would be float64 if the default type were, but changing that would affect hooks and other threads.
    """
    # Not by the globals of `_init_group`: torch's compiler puts a function of its own in its place.
    modules = (sys.modules[kind.__module__] for kind in type(optimizer).__mro__)
    module = next(module for module in modules if hasattr(module, "_get_scalar_dtype"))
    with _patching, ExitStack() as all_replaced:
        wide = replaced(module, "_get_scalar_dtype", lambda is_fused=None: torch.float64)
        all_replaced.enter_context(wide)
        if hasattr(module, "radam"):  # chooses between numbers of the default type
            all_replaced.enter_context(replaced(module, "radam", _with_wide_numbers(module.radam)))
        yield


def _with_wide_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called while float64 is the default type."""

    def called(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    return called
