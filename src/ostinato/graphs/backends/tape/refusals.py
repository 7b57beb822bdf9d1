"""Refuses what a CUDA graph capture forbids, at the line of user code that does it."""

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

from ...blame import frames_now
from ...forbidden import (
    WATCHED_FUNCTIONS,
    Forbidden,
    forbidden_function,
    forbidden_op,
    one_hot_unchecked,
)
from ...known_calls import refusal
from .storages import StorageTable


def _refuse(forbidden: Forbidden | None) -> None:
    if forbidden is not None:
        raise refusal(forbidden, frames_now())


def check_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], storages: StorageTable) -> None:
    """Raise if an ATen call could not be part of a CUDA graph."""
    _refuse(forbidden_op(func, args, kwargs, storages))


class RefusalMode(TorchFunctionMode):
    """Refuses host reads that make no ATen call."""

    def __init__(self, is_active: Callable[[], bool]) -> None:
        super().__init__()
        self._is_active = is_active

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in WATCHED_FUNCTIONS or not self._is_active():
            return func(*args, **kwargs)
        _refuse(forbidden_function(func, args, kwargs))
        unchecked = one_hot_unchecked(func, args, kwargs)
        return func(*args, **kwargs) if unchecked is None else unchecked
