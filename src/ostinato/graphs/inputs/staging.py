"""Host inputs on their way to the device: where each lies, and the pinned memory they are packed into.

Note [Layout]
All fields share one arena. Every rung has its own compact layout in it, so that a rung's inputs are one
contiguous span and travel from the host in a single copy of exactly their size:

    rung of 4 tokens, 2 requests      |ids 4|positions 4|lengths 2|
    rung of 8 tokens, 4 requests      |ids 8        |positions 8        |lengths 4|

A buffer is therefore defined from a `fill` to the replay that follows it, and not across rungs.

Note [Staging]
Host inputs are packed into pinned memory first. A pinned slot must not be written again while a copy still
reads it, and recording an event for every copy costs more than the copy. The slots form a ring of two
halves; an event is recorded when a half is full and waited for when that half comes round again.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from ..burials import bury_later
from ..current_stream import CurrentStream
from ..errors import ConfigError
from .fields import Field, Scalar

_ALIGNMENT = 16
_STAGING_BYTES = 4 << 20
_MOST_VIEWS = 4096


class Layout:
    """Where the fields of one rung lie in an arena."""

    def __init__(self, fields: Sequence[Field], num_tokens: int, num_reqs: int) -> None:
        self.num_tokens = num_tokens
        self.num_reqs = num_reqs
        self.shapes = [field.full_shape(num_tokens, num_reqs) for field in fields]
        self.starts: list[int] = []
        self.ends: list[int] = []
        end = 0
        for field, shape in zip(fields, self.shapes, strict=True):
            self.starts.append(end)
            self.ends.append(end + int(np.prod(shape, dtype=np.int64)) * field.dtype.itemsize)
            end = -(-self.ends[-1] // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = max(end, _ALIGNMENT)

    def views(self, arena: torch.Tensor, fields: Sequence[Field]) -> list[torch.Tensor]:
        return [
            arena[start:end].view(field.dtype).view(shape)
            for field, shape, start, end in zip(fields, self.shapes, self.starts, self.ends, strict=True)
        ]


class Staging:
    """A ring of pinned slots (see Note [Staging])."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._stream = CurrentStream(device)
        count = max(2, min(64, _STAGING_BYTES // nbytes))
        self._half = count // 2
        self._slots = [
            torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            for _ in range(2 * self._half)
        ]
        self._events = [torch.cuda.Event(), torch.cuda.Event()]
        self._views: dict[tuple[int, ...], tuple[torch.Tensor, list[np.ndarray[Any, Any]]]] = {}
        self._next = 0

    def __del__(self) -> None:
        bury_later(vars(self).get("_slots"))

    def slot(
        self, layout: Layout, fields: Sequence[Field], start: int, end: int
    ) -> tuple[torch.Tensor, list[np.ndarray[Any, Any]]]:
        """The next free slot: the bytes from `start` to `end`, and every field in it as an array."""
        number = self._next
        self._next = (number + 1) % len(self._slots)
        if number % self._half == 0:
            self._events[number // self._half].synchronize()
        key = (number, layout.num_tokens, layout.num_reqs, start, end)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            slot = self._slots[number]
            arrays = [as_array(view) for view in layout.views(slot, fields)]
            views = self._views[key] = (slot[start:end], arrays)
        return views

    def sent(self) -> None:
        """The copy out of the slot just used has been queued."""
        number = (self._next - 1) % len(self._slots)
        if (number + 1) % self._half == 0:
            self._events[number // self._half].record(self._stream.get())


_ARRAY_STAND_INS = {1: torch.uint8, 2: torch.int16}


@cache
def stand_in(dtype: torch.dtype) -> torch.dtype:
    """The type whose bytes NumPy can hold: bfloat16 and float8 travel as integers of the same width."""
    if dtype is torch.bfloat16 or str(dtype).startswith("torch.float8"):
        return _ARRAY_STAND_INS[dtype.itemsize]
    return dtype


def as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A host tensor's values as NumPy sees them, without a copy."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    seen_as = stand_in(tensor.dtype)
    return (plain if seen_as is tensor.dtype else plain.view(seen_as)).numpy()


def as_tensor(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """The reverse of `as_array`."""
    tensor = torch.from_numpy(array if array.flags.c_contiguous else array.copy())
    return tensor if tensor.dtype is dtype else tensor.view(dtype)


@cache
def array_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The NumPy type a field's host values have."""
    return torch.empty(0, dtype=stand_in(dtype), device="cpu").numpy().dtype


def raw_scalar(value: Scalar, dtype: torch.dtype) -> Any:
    """A padding value as NumPy writes it; ConfigError if the type cannot hold it."""
    try:
        held = torch.tensor(value, dtype=dtype, device="cpu")
    except (RuntimeError, TypeError, ValueError):
        raise ConfigError(f"the padding {value!r} is not a value of {dtype}") from None
    exact = held.item() == value
    rounded = dtype.is_floating_point and bool(held.double().isfinite()) and isinstance(value, int | float)
    if not exact and not rounded and value == value:
        raise ConfigError(f"the padding {value!r} is not a value of {dtype}: it would become {held.item()!r}")
    return held.view(stand_in(dtype)).item()
