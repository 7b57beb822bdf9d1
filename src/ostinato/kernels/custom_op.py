"""Registers a kernel's function as a custom op of torch.

`torch.library.custom_op` does the same and adds autograd wrappers that inference has no use for: they cost
some 50 microseconds of CPU a call, which is much of the time of a capture, and importing what they need
(dynamo, sympy) takes seconds of every start. Here a function is registered as it is, for all devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_LIBRARY = torch.library.Library("ostinato", "DEF")


class CustomOp(Generic[P, R]):
    """A registered op; call it like the function."""

    def __init__(self, name: str, function: Callable[P, R], mutates_args: tuple[str, ...]) -> None:
        self.name = name
        self.__doc__ = function.__doc__
        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        _LIBRARY.define(name + schema)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        self._call: Any = getattr(torch.ops.ostinato, name).default

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self._call(*args, **kwargs)
        return result

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What the op returns for tensors without data, for torch.compile."""
        torch.library.register_fake(f"ostinato::{self.name}", function, lib=_LIBRARY)
        return function


def custom_op(name: str, *, mutates_args: tuple[str, ...] = ()) -> Callable[[Callable[P, R]], CustomOp[P, R]]:
    """Register the decorated function as `ostinato::name`.

    Its annotations make the schema. Outputs must not share memory with inputs or with each other.
    """
    return lambda function: CustomOp(name, function, mutates_args)
