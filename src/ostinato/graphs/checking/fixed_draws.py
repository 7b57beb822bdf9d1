"""Random numbers replaced by constants, so that steps of other sizes can be compared: these draw others.

A length that is used as a number (`x / len(x)`) shows in no other way where a step draws.
"""

from typing import Any

import torch

from ..dispatch_mode import WatchingMode
from ..journal import draws
from ..memory import tensors_of

aten = torch.ops.aten

_CHANCES = frozenset(("dropout_p", "dropout"))
_PURE = ("rand", "normal", "uniform", "bernoulli", "exponential", "multinomial", "poisson", "binomial")
_ALSO_PURE = ("cauchy", "geometric", "gamma", "dirichlet")


class DrawsAreMixed(Exception):
    """An operation draws and does something else besides, as recurrent layers with dropout."""


class FixedDraws(WatchingMode):
    """Active as a context manager: what is drawn is one half; of integers zero, of places the last."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        if func is aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if any(argument.name in _CHANCES for argument in func._schema.arguments):
            return self._without_chance(func, args, kwargs)
        if not any(word in func.name() for word in _PURE + _ALSO_PURE):
            raise DrawsAreMixed(func.name())
        result = func(*args, **kwargs)
        place = args[0].size(-1) - 1 if "multinomial" in func.name() else 0
        for tensor in tensors_of(result):
            tensor.fill_(0.5 if tensor.is_floating_point() else place)
        return result

    def _without_chance(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Attention with dropout, without."""
        given = dict(kwargs)
        positional = list(args)
        for position, argument in enumerate(func._schema.arguments):
            if argument.name in _CHANCES and position < len(positional):
                positional[position] = 0.0
            elif argument.name in _CHANCES:
                given[argument.name] = 0.0
        return func(*positional, **given)
