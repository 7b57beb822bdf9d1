"""Arguments that a function writes in place. A graph works on copies of them, which are copied back."""

import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..inputs.buffers import Batch
from ..memory import byte_range, storage_address

logger = logging.getLogger("ostinato.graphs")

_WORTH_A_WARNING = 1 << 20
"""Bytes per call."""


class InPlace:
    """What a function writes: arguments, and tensors of its own."""

    def __init__(self, arguments: Sequence[str], written: Collection[int], reached: Collection[int]) -> None:
        """`written`: addresses of the storages that the function writes besides its arguments; `reached`:
        of all that it uses."""
        self.arguments = arguments
        self._reached = frozenset(reached)
        self._written = frozenset(written) & self._reached
        self.counts = bool(arguments or self._written)
        """Whether there is anything in which copies could differ."""

    def why_not(self, batch: Batch) -> str | None:
        """Why copies of these arguments would not behave as the arguments themselves, if they would not."""
        for name in self.arguments:
            if (why_not := self._why_not_copied_back(name, batch)) is not None:
                return why_not
        if self._written:
            for name, value in batch.items():
                if storage_address(value) in self._written:
                    return f"{name} is memory that the function writes by another way as well: pass a clone"
        return None

    def _why_not_copied_back(self, name: str, batch: Batch) -> str | None:
        value = batch[name]
        if value.requires_grad and torch.is_grad_enabled():
            return f"the function writes {name} in place, which requires gradients: detach() it"
        if value.is_inference() and not torch.is_inference_mode_enabled():
            return f"the function writes {name} in place, which was made under inference_mode: pass a clone"
        if torch._debug_has_internal_overlap(value) == 1:  # type: ignore[attr-defined]
            return f"the function writes {name} in place, whose elements share memory (expand): pass a clone"
        start, end = byte_range(value)
        for other, tensor in batch.items():
            first, last = byte_range(tensor)
            if other != name and tensor.device == value.device and first < end and start < last:
                return (
                    f"{name} and {other} share memory, but the function writes {name} in place: pass a clone"
                )
        if storage_address(value) in self._reached:
            return f"the function writes {name} in place and also reaches its memory otherwise: pass a clone"
        return None

    def tell(self, batch: Batch) -> None:
        """Log what it costs that a graph works on copies."""
        if self.arguments:
            nbytes = sum(batch[name].nbytes for name in self.arguments)
            logger.log(
                logging.WARNING if nbytes >= _WORTH_A_WARNING else logging.INFO,
                "the function writes %s in place: every call copies that to the graph and back, twice %s "
                "bytes for a call like this one. A tensor that is no argument (a buffer of the module, a "
                "variable of a closure) is written where it is",
                ", ".join(self.arguments),
                f"{nbytes:,}",
            )


def geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor is, and how its elements lie there."""
    return tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.dtype
