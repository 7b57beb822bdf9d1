"""Finds NaN and infinite values among weights: one reduction a tensor on its device, results read once."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from .errors import WeightsError

logger = logging.getLogger("ostinato.models")

_MOST_VALUES = 2**30
"""Of one reduction: kernels for more values than 32 bits can number are slower, or missing."""
_MOST_NAMED = 4


class FiniteCheck:
    """Collects the least and the largest value of each weight; a NaN is both."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: that of the model. A value may be finite in a checkpoint and too large for the model."""
        self._dtype = dtype
        self._bounds: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor, Tensor]]] = {}

    @torch.no_grad()
    def add(self, name: str, values: Tensor) -> None:
        """Launches the reduction of a weight; the host waits for nothing."""
        if not values.numel():
            return
        entries = self._bounds.setdefault((values.device, values.dtype), [])
        rows = max(1, _MOST_VALUES * values.size(0) // values.numel())
        for part in values.detach().split(rows):
            low, high = torch.aminmax(part)
            entries.append((name, low, high))

    @torch.no_grad()
    def bad(self) -> list[str]:
        """Returns the names of weights that are not finite in the model's type. Waits for the reductions."""
        names: dict[str, None] = {}
        for entries in self._bounds.values():
            bounds = torch.stack([bound for _, low, high in entries for bound in (low, high)])
            # Rounding keeps the order, so the bounds overflow if any value does.
            are_finite = bounds.to(self._dtype).isfinite().view(-1, 2).all(dim=1).tolist()
            names |= dict.fromkeys(
                name for (name, _, _), is_finite in zip(entries, are_finite, strict=True) if not is_finite
            )
        self._bounds.clear()
        return list(names)


def refuse_nonfinite(
    found: Iterable[tuple[str, Tensor]], dtype: torch.dtype, *, place: str, allowed: bool
) -> None:
    """Raises WeightsError that says what is wrong with each of these weights of a model in `dtype`, or warns
    of it if they are `allowed`. Without any, does nothing."""
    told: list[str] = []
    num_more, overflow = 0, False
    for name, values in found:
        if len(told) == _MOST_NAMED:
            num_more += 1
            continue
        why, is_too_large = _faults(values, dtype)
        told.append(f"{name} ({why})")
        overflow |= is_too_large
    if not told:
        return
    more = f" and {num_more} more" if num_more else ""
    what = f"{place}weights that are not finite in {_named(dtype)}: {', '.join(told)}{more}"
    if allowed:
        logger.warning("%s; they are used all the same (allow_nonfinite_weights)", what)
        return
    repair = (
        "use a dtype with a larger range, such as bfloat16"
        if overflow
        else "get these weights again from where they come from"
    )
    raise WeightsError(
        f"{what}; whatever is computed with them becomes NaN; {repair}, or set allow_nonfinite_weights"
    )


@torch.no_grad()
def _faults(values: Tensor, dtype: torch.dtype) -> tuple[str, bool]:
    """Counts what is wrong with a weight; and whether some of its values are only too large for `dtype`."""
    values = values.detach()
    too_large = values.isfinite() & ~values.to(dtype).isfinite()
    counts = {
        "NaN": values.isnan(),
        "inf": values == float("inf"),
        "-inf": values == float("-inf"),
        f"values above {torch.finfo(dtype).max:g}, the largest of {_named(dtype)}": too_large & (values > 0),
        f"values below -{torch.finfo(dtype).max:g}, the least of {_named(dtype)}": too_large & (values < 0),
    }
    found = [(int(places.sum()), what) for what, places in counts.items()]
    text = ", ".join(f"{count:,} {what}" for count, what in found if count)
    return f"{text} of {values.numel():,}", bool(too_large.any())


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
