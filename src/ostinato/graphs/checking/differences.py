"""Measures how far two tensors differ: one comparison for results, for state and for gradients.

Note [What hides a difference]
A norm over all elements shows nothing but the largest: beside a mask of -inf, a running minimum that starts
at 1e30, or one huge entry of a history, no other element counts. So each element is measured by a size of its
own: what it is, or, in state, what the step changed of it. But where a sum happens to come out near zero, its
rounding is that of its terms. So nothing is measured by less than the median size of its neighbours, those
left out that are equal and so large that rounding at their size would have swallowed what does differ.
Elements equal in both say nothing. Infinities and NaNs have to be the same.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

_CHUNK = 1 << 18
"""Elements that are compared at a time: no copy of all is made in a wider type."""
_SAMPLE = 1 << 16
"""Elements that the median is taken of."""
_ROUNDING = 4
"""Roundings in the last place that an update of state may differ by."""
_REACH = 0.125
"""Part of the smallest step of a number below which rounding at its size does not reach."""
_LOST = 1e-2
"""Of what a state held, as a part of its last digits, for it to be taken as a term of what it holds now."""

_GROSS = {torch.float64: 1e-6, torch.complex128: 1e-6}
_GROSS_OF_FEW_BITS = 0.1
"""Fraction of an output's norm; a larger difference is not due to rounding."""
_GROSS_IN_FULL, _GROSS_SHORTENED = 3e-4, 1e-2
"""The same for float32 in full precision, and where TF32 is allowed: the batch size may decide which kernel
runs, and so the rounding."""


class Seen(Protocol):
    """What was seen of a computation."""

    @property
    def work(self) -> Sequence[tuple[Any, str]]:
        """Its operators."""

    @property
    def rounds_to_few_bits(self) -> bool:
        """Returns whether it computed in 16 bits or fewer."""


def difference(
    got: torch.Tensor, wanted: object, before: torch.Tensor | None = None, *, floor: float = 0.0
) -> float:
    """Returns by how much the elements that differ do so, as a root of the mean square, relative to their
    size, see Note [What hides a difference]; of integers and booleans the share of those that differ.

    `before`: what a step found in a tensor that it has changed; then only what either run changed counts.
    `floor`: the least size that anything is measured by.
    """
    if not isinstance(wanted, torch.Tensor) or got.shape != wanted.shape or got.dtype != wanted.dtype:
        return float("inf")
    if got.numel() == 0:
        return 0.0
    if not (got.is_floating_point() or got.is_complex()):
        unlike = got != wanted
        if before is None:
            return float(unlike.double().mean())
        changed = (got != before) | (wanted != before)
        return float(unlike.sum() / changed.sum().clamp(min=1))
    eps = torch.finfo(got.dtype).eps
    flat = _flat(got), _flat(wanted), None if before is None else _flat(before)
    largest, chunks = _largest_unlike(flat)
    if not chunks or largest == float("inf"):
        return largest
    typical = max(_typical(flat[1], flat[2], largest, eps), floor)
    squares, count = 0.0, 0
    for one, other, was in (_wide(flat, at) for at in chunks):
        off = (one - other).abs()
        sizes = _sizes(other, was)
        if was is not None:
            reach = torch.maximum(one.abs(), other.abs())
            terms = torch.where(was.abs() * eps <= _LOST * reach, was.abs(), 0.0)
            off = (off - _ROUNDING * eps * torch.maximum(reach, terms)).clamp(min=0)
        counts = off > 0  # neither NaN nor what is infinite in both
        relative = off[counts] / sizes[counts].clamp(min=typical)
        squares += float((relative * relative).sum())
        count += int(counts.sum())
    return float((squares / max(1, count)) ** 0.5)


def difference_as_a_whole(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Returns the norm of the difference relative to that of what was wanted: for gradients, most of which
    may be zero up to rounding, and differ in all digits then. Infinities and NaNs have to be the same."""
    size, off = _norm(wanted), _norm(got - wanted)
    if size + off < float("inf"):
        return off / size if size else (float("inf") if off else 0.0)
    finite = got.isfinite() & wanted.isfinite()
    if not bool((finite | (got == wanted) | (got.isnan() & wanted.isnan())).all()):
        return float("inf")
    return difference_as_a_whole(got[finite], wanted[finite])


def _norm(values: torch.Tensor) -> float:
    """Summed in float64, without a float64 copy."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)


_Flat = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def _wide(flat: _Flat, at: int) -> _Flat:
    one, other, was = flat
    end = at + _CHUNK
    return _widened(one[at:end]), _widened(other[at:end]), None if was is None else _widened(was[at:end])


def _widened(values: torch.Tensor) -> torch.Tensor:
    """A complex number is one element: rounding of either part is relative to its modulus."""
    return values.to(torch.complex128) if values.is_complex() else values.double()


def _largest_unlike(flat: _Flat) -> tuple[float, list[int]]:
    """The largest size of elements that differ, infinite where a NaN or infinity does, and their chunks."""
    largest, found = 0.0, []
    for at in range(0, flat[0].numel(), _CHUNK):
        one, other, _ = _wide((*flat[:2], None), at)
        unlike = (one != other) & ~(one.isnan() & other.isnan())
        if bool(unlike.any()):
            most = float(torch.maximum(one.abs(), other.abs())[unlike].max())  # NaN if there is one
            largest = max(largest, most if most == most else float("inf"))
            found.append(at)
    return largest, found


def _sizes(wanted: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    if before is None:
        return wanted.abs()
    return torch.where(before.isfinite(), torch.minimum(wanted.abs(), (wanted - before).abs()), wanted.abs())


def _typical(wanted: torch.Tensor, before: torch.Tensor | None, largest: float, eps: float) -> float:
    """The median size, of elements that rounding may have carried to those that differ."""
    step = (wanted.numel() // _SAMPLE) | 1  # odd, to meet all columns
    sizes = _sizes(_widened(wanted[::step]), None if before is None else _widened(before[::step]))
    near = sizes[(sizes > 0) & (sizes * eps * _REACH <= largest)]
    return float(near.median()) if near.numel() else 0.0


def gross(dtype: torch.dtype, device: torch.device, seen: Seen) -> float:
    """The largest difference that rounding may cause in numbers of this type, in the runs that were seen."""
    if dtype.itemsize <= 2 or seen.rounds_to_few_bits:  # float32 may be what bfloat16 was widened to
        return _GROSS_OF_FEW_BITS
    if dtype in _GROSS:
        return _GROSS[dtype]
    return _GROSS_SHORTENED if _may_be_shortened(device, seen.work) else _GROSS_IN_FULL


def _may_be_shortened(device: torch.device, work: Sequence[tuple[Any, str]]) -> bool:
    """Returns whether products of float32 may be computed with fewer digits, as torch is set."""
    try:
        if torch.get_float32_matmul_precision() != "highest":
            return True
        if device.type == "cpu" or not torch.backends.cudnn.allow_tf32:
            return False
    except RuntimeError:  # set in torch's newer way, which these questions do not know
        return True
    return any("conv" in str(op) or "cudnn" in str(op) for op, _ in work)
