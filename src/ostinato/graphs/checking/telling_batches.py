"""Batches in which padding shows, made of the rows of one.

Note [Rows that mix]
The largest number of a batch is the same with padding as without it, unless it is in the padding: one batch
may show no difference although the results of the next are wrong. Replacing the padding by other rows shows
whether rows affect each other at all. If they do, batches are tried in which padding stands out: all rows
alike and near zero, on either side of it, numbers of one sign, and some random ones.
"""

from collections.abc import Iterator, Sequence

import torch

from ..dispatching.descriptor import BatchShape
from ..inputs.buffers import Batch
from ..inputs.fields import Extent, Field

FLIPS = 0.02
"""Fraction of integers that rounding may decide, such as the index of the largest of nearly equal numbers.
None in `verify`, and all of them in a batch of a few rows."""
_BY_CHANCE = 6
"""Random batches that are tried if rows mix, for effects that only some numbers show."""


def telling(batch: Batch, fields: Sequence[Field], shape: BatchShape) -> Iterator[tuple[Batch, float]]:
    """Batches in which padding stands out, see Note [Rows that mix], and the fraction of integers that
    rounding may decide: all of them if rows are alike."""
    for row, factor in ((0, 0.1), (0, -0.1), (1, 0.03), (1, -0.03), (shape.num_tokens - 1, 0.1)):
        yield all_like(batch, fields, row, factor), 1.0
    of_one_sign = {k: _away_from_zero(v) if v.is_floating_point() else v for k, v in batch.items()}
    for sign in (1.0, -1.0):
        yield scaled(of_one_sign, fields, sign), FLIPS
    if (beside := beside_padding(batch, fields)) is not None:
        for each in (beside, scaled({**of_one_sign, **_places_of(beside, fields)}, fields, -1.0)):
            yield each, FLIPS
    generator = torch.Generator().manual_seed(0)
    for number in range(_BY_CHANCE):
        yield _each_scaled(batch, fields, generator, with_signs=number % 2 == 1), FLIPS


def showing_in_state(batch: Batch, whole: Batch, fields: Sequence[Field]) -> Iterator[Batch]:
    """Batches in which padding shows in what a step keeps: numbers of one sign for extrema, and, for places,
    rows that all have the same, which is not that of padding, if `whole`, a larger batch, has such a row."""
    of_one_sign = {k: _away_from_zero(v) if v.is_floating_point() else v for k, v in batch.items()}
    for sign in (1.0, -1.0):
        yield scaled(of_one_sign, fields, sign)
    rowed = [field for field in fields if field.per is not Extent.FIXED]
    places = [field for field in rowed if not is_number(field.dtype)]
    for row in reversed(range(whole[rowed[0].name].size(rowed[0].dim) if places else 0)):
        if not any(is_blank(whole[f.name].select(f.dim, row), f) for f in places):
            alike = all_like(whole, fields, row, 1.0)
            yield {
                **alike,
                **{f.name: alike[f.name].narrow(f.dim, 0, batch[f.name].size(f.dim)) for f in rowed},
            }
            return


def beside_padding(batch: Batch, fields: Sequence[Field]) -> Batch | None:
    """The batch with integers of padding in all rows: an index that groups rows puts real ones beside
    padded ones, whatever groups the first call had. Padding is legal by its owner's word, and no integers are
    combined that do not lie together in a padded row. Values that were declared for padding are not for real
    rows, so that there is no such batch then."""
    places = [f for f in fields if f.per is not Extent.FIXED and not is_number(f.dtype)]
    if not places or any(f.may_write for f in places):
        return None
    return {**batch, **{f.name: torch.full_like(batch[f.name], f.pad) for f in places}}


def _places_of(batch: Batch, fields: Sequence[Field]) -> Batch:
    return {f.name: batch[f.name] for f in fields if not is_number(f.dtype)}


def _each_scaled(
    batch: Batch, fields: Sequence[Field], generator: torch.Generator, *, with_signs: bool
) -> Batch:
    """Multiply each floating row of each input by a different number; `with_signs`: each number by a sign."""
    more = dict(batch)
    for field in fields:
        value = batch[field.name]
        if field.per is not Extent.FIXED and value.is_floating_point():
            shape = [1] * value.dim()
            shape[field.dim] = value.size(field.dim)
            factors = torch.randn(shape, generator=generator, device="cpu")
            if with_signs:
                factors = factors * (torch.rand(value.shape, generator=generator, device="cpu") - 0.5).sign()
            more[field.name] = (value.double() * factors.to(value.device)).to(value.dtype)
    return more


def all_like(batch: Batch, fields: Sequence[Field], row: int, factor: float) -> Batch:
    """A batch whose rows all equal one of them, floating ones scaled towards zero."""
    alike = dict(batch)
    for field in fields:
        if field.per is not Extent.FIXED:
            value = batch[field.name]
            size = value.size(field.dim)
            index = torch.full((size,), row % size, device=value.device)
            alike[field.name] = value.index_select(field.dim, index)
    return scaled(alike, fields, factor)


def scaled(batch: Batch, fields: Sequence[Field], factor: float) -> Batch:
    """The batch with floating rows multiplied."""
    rowed = {field.name for field in fields if field.per is not Extent.FIXED}
    return {
        name: times(value, factor) if name in rowed and value.is_floating_point() else value
        for name, value in batch.items()
    }


def in_front(first: Batch, batch: Batch, fields: Sequence[Field]) -> Batch:
    """These rows, followed by those that a larger batch has in the same places."""
    joined = dict(batch)
    for field in fields:
        if field.per is not Extent.FIXED:
            front, whole = first[field.name], batch[field.name]
            rows = front.size(field.dim)
            behind = whole.narrow(field.dim, rows, whole.size(field.dim) - rows)
            joined[field.name] = torch.cat([front, behind], field.dim)
    return joined


def _away_from_zero(value: torch.Tensor) -> torch.Tensor:
    """Numbers not larger than the largest, and not much smaller than their mean."""
    sizes = value.double().abs()
    return ((sizes + sizes.mean()) / 2).to(value.dtype)


def times(value: torch.Tensor, factor: float) -> torch.Tensor:
    return value.double().mul(factor).to(value.dtype)  # numbers of eight bits know no arithmetic


def unlike_padding(batch: Batch, fields: Sequence[Field]) -> Batch:
    """The same inputs, with numbers between 0 and 1 in inputs that equal the padding, as in a first call with
    zeros.

    Not if there are integers that equal the padding: these may be places to write to, and rows that are all
    written to the place of padding do depend on each other.
    """
    generator = torch.Generator().manual_seed(0)
    blank = [
        field for field in fields if field.per is not Extent.FIXED and is_blank(batch[field.name], field)
    ]
    if not all(batch[field.name].is_floating_point() for field in blank):
        return batch
    new = {field.name: batch[field.name] for field in blank}
    return {
        **batch,
        **{k: torch.rand(v.shape, generator=generator, device="cpu").to(v) for k, v in new.items()},
    }


def is_number(dtype: torch.dtype) -> bool:
    """Returns whether no value of this type is a place."""
    return dtype.is_floating_point or dtype.is_complex


def is_blank(value: torch.Tensor, field: Field) -> bool:
    """Returns whether an input looks like padding."""
    numbers = value if value.is_complex() else value.double()
    return bool((numbers == field.pad).all())


def padded_batch(
    batch: Batch, fields: Sequence[Field], shape: BatchShape, full: BatchShape, *, real: set[str]
) -> Batch:
    """A batch of a graph's size: the given rows, then padding, or, in the inputs named in `real`, these rows
    again."""
    whole = dict(repeated(batch, fields, shape, full))
    for field in fields:
        if field.per is not Extent.FIXED and field.name not in real:
            rows = batch[field.name].size(field.dim)
            value = whole[field.name].clone()
            value.narrow(field.dim, rows, value.size(field.dim) - rows).fill_(field.pad)
            whole[field.name] = value
    return whole


def repeated(batch: Batch, fields: Sequence[Field], shape: BatchShape, full: BatchShape) -> Batch:
    """The batch with its rows repeated in place of the padding."""
    rows = dict(batch)
    for field in fields:
        if field.per is not Extent.FIXED:
            index = torch.arange(full.num_tokens, device=batch[field.name].device) % shape.num_tokens
            rows[field.name] = batch[field.name].index_select(field.dim, index)
    return rows
