"""Activation checkpointing inside graphs.

`torch.utils.checkpoint` resets the random generator before it recomputes a region, so that dropout draws the
same mask. A generator cannot be reset while a graph is recorded, nor would a replay do it. So while a step is
recorded, a region's draws are kept (of dropout the mask) instead of drawn again.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from ..dispatch_mode import DispatchMode
from ..journal import draws, given_as
from ..memory import tensors_of

aten = torch.ops.aten


class _Kept:
    """What a region drew, in order."""

    def __init__(self) -> None:
        self.values: list[list[torch.Tensor]] = []


class _KeepDraws(DispatchMode):
    """Active while the region runs forward."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _matters(func, args, kwargs or {}):
            drawn = [result[1]] if func is aten.native_dropout.default else list(tensors_of(result))
            self._kept.values.append([tensor.detach().clone() for tensor in drawn])
        return result


class _GiveDraws(DispatchMode):
    """Active while the region is recomputed."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self._kept = kept
        self._next = 0

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _matters(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        drawn = self._kept.values[self._next]
        self._next += 1
        if func is aten.native_dropout.default:
            mask, chance = drawn[0], 1 - args[1]
            return aten.native_dropout_backward(args[0], mask, 1 / chance if chance else 0.0), mask
        if func._schema.is_mutable:
            return args[0].copy_(drawn[0])
        single = len(func._schema.returns) == 1
        return drawn[0] if single else tuple(drawn)


def _matters(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers whose values its arguments do not fix."""
    if not draws(func, args, kwargs):
        return False
    chances = given_as(("p",), func, args, kwargs)
    return all(chance is None or isinstance(chance, torch.Tensor) or chance > 0 for chance in chances)


@contextmanager
def _both(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


class _NotReentrant:
    """Replaces torch's reentrant kind: it computes the same, in a way that graphs can record."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
            with torch.no_grad():  # that kind needs an argument that requires a gradient
                return function(*args)
        return sys.modules["torch.utils.checkpoint"].checkpoint(function, *args, use_reentrant=False)


@contextmanager
def draws_are_kept() -> Iterator[None]:
    """A context in which a step with checkpointed regions may be recorded."""
    module: Any = sys.modules.get("torch.utils.checkpoint")
    if module is None:
        yield
        return
    plain, reentrant = module._checkpoint_without_reentrant_generator, module.CheckpointFunction

    def keeping(function: Any, preserve: bool = True, context_fn: Any = None, *rest: Any, **more: Any) -> Any:
        kept = _Kept()

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            forward, again = (context_fn or module.noop_context_fn)()
            return _both(forward, _KeepDraws(kept)), _both(again, _GiveDraws(kept))

        return plain(function, False, contexts, *rest, **more)

    module._checkpoint_without_reentrant_generator, module.CheckpointFunction = keeping, _NotReentrant
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator, module.CheckpointFunction = plain, reentrant
