"""Registers a kernel's function as a custom op of torch.

`torch.library.custom_op` does the same and adds autograd wrappers that inference has no use for: they cost
some 50 microseconds of CPU a call, which is much of the time of a capture, and importing what they need
(dynamo, sympy) takes seconds of every start. Here a function is registered as it is, for all devices.

While nobody watches, a call does not even go through torch's dispatcher, which takes some 6 microseconds and
which a capture of all graphs would pass twenty thousand times.

Operands that belong together are one parameter, a named tuple. The schema has its fields in its place, since
torch dispatches calls with nothing but tensors and numbers:

    def project(x: Tensor, adapters: Operands) -> Tensor        project(x, a, b, ranks, ...) -> Tensor
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Generic, ParamSpec, TypeVar, get_type_hints

import torch

P = ParamSpec("P")
R = TypeVar("R")

_LIBRARY = torch.library.Library("ostinato", "DEF")


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str, torch.dtype})
"""Arguments of these types would be handed over as they are: no tensor with a dispatch of its own."""


class CustomOp(Generic[P, R]):
    """A registered op; call it like the function."""

    def __init__(
        self,
        name: str,
        function: Callable[P, R],
        mutates_args: tuple[str, ...],
        result: Callable[..., R] | None,
    ) -> None:
        self.name = name
        self.__doc__ = function.__doc__
        self._function = function
        self._signature = inspect.signature(function)
        self._tuples = _named_tuples(function)
        schema = torch.library.infer_schema(self._spread_prototype(), mutates_args=mutates_args)
        _LIBRARY.define(name + schema)
        implementation: Callable[..., R] = self._call_gathered if self._tuples else function
        _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
        self._dispatched: Any = getattr(torch.ops.ostinato, name).default
        if result is not None or get_type_hints(function)["return"] is type(None):
            torch.library.register_fake(f"ostinato::{name}", self._fake(result), lib=_LIBRARY)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        flat = tuple(self._spread(args)) if self._tuples else args
        types = map(type, (*flat, *kwargs.values()) if kwargs else flat)
        if _is_watched() or not _PLAIN.issuperset(types):
            result: R = self._dispatched(*flat, **kwargs)
            return result
        return self._function(*args, **kwargs)

    def _spread(self, args: tuple[Any, ...]) -> Iterable[Any]:
        """Yields arguments as the schema has them."""
        for position, argument in enumerate(args):
            if position in self._tuples:
                yield from argument
            else:
                yield argument

    def _gathered(self, flat: tuple[Any, ...]) -> list[Any]:
        """Returns arguments as the function has them."""
        left = list(flat)
        for position, kind in self._tuples.items():
            end = position + len(kind._fields)
            left[position:end] = [kind(*left[position:end])]
        return left

    def _call_gathered(self, *flat: Any, **kwargs: Any) -> R:
        return self._function(*self._gathered(flat), **kwargs)  # type: ignore[arg-type]

    def _fake(self, result: Callable[..., R] | None) -> Callable[..., R | None]:
        """Returns what torch calls for tensors without data."""
        names = () if result is None else tuple(inspect.signature(result).parameters)

        def fake(*flat: Any, **kwargs: Any) -> R | None:
            if result is None:
                return None
            given = self._signature.bind(*self._gathered(flat), **kwargs)
            given.apply_defaults()
            return result(**{name: given.arguments[name] for name in names})

        return fake

    def _spread_prototype(self) -> Callable[..., R]:
        """Returns a function with the signature that the schema is made from; it is never called."""
        hints = get_type_hints(self._function)
        parameters: list[inspect.Parameter] = []
        for position, parameter in enumerate(self._signature.parameters.values()):
            if position in self._tuples:
                of_fields = get_type_hints(self._tuples[position])
                parameters += [
                    inspect.Parameter(field, parameter.kind, annotation=of_fields[field])
                    for field in self._tuples[position]._fields
                ]
            else:
                parameters.append(parameter.replace(annotation=hints[parameter.name]))

        def prototype(*_: Any) -> R:
            raise NotImplementedError

        spread = inspect.Signature(parameters, return_annotation=_returned(hints["return"]))
        prototype.__signature__ = spread  # type: ignore[attr-defined]
        return prototype


def _returned(annotation: Any) -> Any:
    """Returns a return type as torch spells it."""
    return None if annotation is type(None) else annotation


def _named_tuples(function: Callable[..., Any]) -> dict[int, Any]:
    """Returns the positions of parameters that are named tuples, with their types."""
    hints = get_type_hints(function)
    kinds = [hints[name] for name in inspect.signature(function).parameters]
    return {position: kind for position, kind in enumerate(kinds) if hasattr(kind, "_fields")}


_is_compiling = torch.compiler.is_compiling
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_num_function_modes = torch._C._len_torch_function_stack
_innermost_transform = torch._C._functorch.peek_interpreter_stack


def _is_watched() -> bool:
    """Tells whether torch.compile, a mode or a transform wants to see the ops that are called."""
    return bool(
        _is_compiling()
        or _num_dispatch_modes()
        or _num_function_modes()
        or _innermost_transform() is not None
    )


def custom_op(
    name: str, *, mutates_args: tuple[str, ...] = (), result: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], CustomOp[P, R]]:
    """Registers the decorated function as `ostinato::name`; its annotations make the schema.

    `result` returns empty outputs for tensors without data (fake tensors, torch.compile). It takes some of
    the op's parameters, by name; an op that returns nothing needs none. Outputs must not share memory with
    inputs or with each other.
    """
    return lambda function: CustomOp(name, function, mutates_args, result)
