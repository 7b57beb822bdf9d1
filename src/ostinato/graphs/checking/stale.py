"""Guarded results: using one that a later replay has overwritten raises an error."""

from typing import Any, Protocol

import torch

from ..errors import StaleOutputError
from ..memory import storage_address
from ..trees import map_tensors, tensors_in


class Lender(Protocol):
    """Whose memory a result is in."""

    generation: int
    """How often that memory was overwritten."""


class GuardedOutput(torch.Tensor):
    """An output in shared memory, valid until a replay overwrites it. Views of it are guarded too."""

    _lender: Lender
    _generation: int
    _origin: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        guards: dict[int, GuardedOutput] = {}
        for tensor in tensors_in((args, kwargs or {})):
            if isinstance(tensor, GuardedOutput) and hasattr(tensor, "_lender"):
                tensor._raise_if_stale()
                guards[_storage(tensor)] = tensor
        result = super().__torch_function__(func, types, args, kwargs or {})

        def guard_views(tensor: torch.Tensor) -> torch.Tensor:
            guard = guards.get(_storage(tensor))
            return _plain(tensor) if guard is None else _guarded(tensor, guard)

        return map_tensors(guard_views, result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._raise_if_stale()
        return _plain(self).clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        self._raise_if_stale()
        return _plain(self).clone()

    def _raise_if_stale(self) -> None:
        if self._generation != self._lender.generation:
            later = self._lender.generation - self._generation
            raise StaleOutputError(
                f"the output of {self._origin} was used {later} replay(s) after its own: its memory is "
                f"shared and has been overwritten. Clone what must last before the next step, or ask for "
                f"copies (results='copied')"
            )


def _storage(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return storage_address(tensor)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def _guarded(tensor: torch.Tensor, like: GuardedOutput) -> GuardedOutput:
    return _mark(tensor, like._lender, like._generation, like._origin)


def _mark(tensor: torch.Tensor, lender: Lender, generation: int, origin: str) -> GuardedOutput:
    with torch._C.DisableTorchFunctionSubclass():
        guarded = tensor.as_subclass(GuardedOutput)
    guarded._lender, guarded._generation, guarded._origin = lender, generation, origin
    return guarded


def guarded_by(tensor: torch.Tensor, lender: Lender, origin: str) -> GuardedOutput:
    """The same output, with a guard that knows when it is overwritten."""
    return _mark(tensor, lender, lender.generation, origin)
