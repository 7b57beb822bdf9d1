"""Finds padded rows that write where a caller keeps something: a cache, a table of what was seen, a count.

Padded rows are computed like any other, so whatever they hold as an index is a place that they write to. That
is harmless only if nobody uses this place, and only the caller can say so, by choosing the padding himself.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from ..capturing.captured import CapturedGraph
from ..capturing.trial import Trials
from ..dispatching.descriptor import BatchShape
from ..errors import CaptureError
from ..inputs.buffers import Batch
from ..inputs.fields import Extent, Field
from ..journal import Hits, WrittenRegion
from ..memory import byte_range, storage_address
from .verify import Verifiable, eager_rows, shapes_to_try

Place = str | int
"""An argument by name, or the address of a storage."""


class HitPlaces(NamedTuple):
    """What a run wrote besides rows of its arguments, in order."""

    hits: Sequence[tuple[Place, Hits]]

    @classmethod
    def of(
        cls, regions: Iterable[WrittenRegion], inputs: Mapping[str, torch.Tensor], fields: Sequence[Field]
    ) -> "HitPlaces":
        """`inputs`: the tensors that the step was given."""
        has_rows = {field.name for field in fields if field.per is not Extent.FIXED}
        found: list[tuple[Place, Hits]] = []
        for region in regions:
            name = argument_of(region, inputs)
            if region.hits is not None and name not in has_rows:
                found.append((storage_address(region.tensor) if name is None else name, region.hits))
        return cls(found)

    def totals(self) -> dict[Place, int]:
        """The number of entries that wrote to each place."""
        totals: dict[Place, int] = {}
        for place, hit in self.hits:
            totals[place] = totals.get(place, 0) + hit.total
        return totals

    def besides(self, other: "HitPlaces") -> "HitPlaces":
        """By how much entries wrote more often than those of another run; none if it made other writes."""
        if [place for place, _ in self.hits] != [place for place, _ in other.hits]:
            return HitPlaces(())
        found: list[tuple[Place, Hits]] = []
        for (place, one), (_, two) in zip(self.hits, other.hits, strict=True):
            if one.counts is None or two.counts is None or one.counts.shape != two.counts.shape:
                more = torch.zeros((), dtype=torch.int32, device=one.tensor.device)
            else:
                more = (one.counts - two.counts).clamp(min=0)
            found.append((place, Hits(one.tensor, more)))
        return HitPlaces(found)

    @property
    def total(self) -> int:
        """The number of entries that wrote."""
        return sum(self.totals().values())

    def tensor_at(self, place: Place) -> torch.Tensor:
        """The tensor by which a place was written first."""
        return next(hit.tensor for at, hit in self.hits if at == place)

    def free(self, region: WrittenRegion) -> torch.Tensor | None:
        """Which elements of a region depend on nothing but real rows and their order; None if all do. Not
        those that these entries wrote, nor what several entries of the same call did."""
        free: torch.Tensor | None = None
        address = storage_address(region.tensor)
        if ours := [hit for place, hit in self.hits if place == address and hit.total]:
            storage, size = region.tensor.untyped_storage(), region.tensor.itemsize
            flat = torch.ones(storage.nbytes() // size, dtype=torch.bool, device=storage.device)
            for hit in ours:
                assert hit.counts is not None
                _as(hit.tensor, flat).masked_fill_(hit.counts > 0, False)
            free = _as(region.tensor, flat)
            free = free.clone() if region.rows is None else region.rows.read(free)
        if region.rows is not None and region.hits is not None and not region.rows.is_sum:
            assert region.hits.counts is not None
            once = region.rows.read((region.hits.counts < 2).expand(region.tensor.shape))
            free = once if free is None else free & once
        return free


def argument_of(region: WrittenRegion, inputs: Mapping[str, torch.Tensor]) -> str | None:
    """The argument that a region is part of, if it is."""
    start = region.tensor.data_ptr()
    for name, tensor in inputs.items():
        first, last = byte_range(tensor)
        if first <= start < last:
            return name
    return None


def _as(tensor: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    return flat.as_strided(tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def padded_hits(
    runner: Verifiable,
    graph: CapturedGraph,
    batch: Batch,
    shape: BatchShape,
    trials: Trials,
    *,
    real: Iterable[str] = (),
) -> HitPlaces:
    """What the padded step writes, with real rows in place of the padding of some inputs (`real`)."""
    fields, full = runner.buffers.fields, shapes_to_try(graph.descriptor)[0]
    whole = padded_batch(batch, fields, shape, full, real=set(real))
    runner.buffers.fill(whole, full, graph.descriptor)
    trials.run(lambda: eager_rows(runner, graph, shape), counting=True)
    return HitPlaces.of(trials.regions, runner.buffers.views(graph.descriptor), fields)


def refuse_writes_of_padding(
    runner: Verifiable,
    graph: CapturedGraph,
    batch: Batch,
    shape: BatchShape,
    trials: Trials,
    alone: HitPlaces,
) -> HitPlaces:
    """Raises CaptureError if padded rows write more than real rows do alone, unless they write where padding
    that the caller chose says. Returns what they write there."""
    padded = padded_hits(runner, graph, batch, shape, trials)
    before, now = alone.totals(), padded.totals()
    more = {place: number - before.get(place, 0) for place, number in now.items()}
    more = {place: number for place, number in more.items() if number > 0}
    if not more:
        return HitPlaces(())

    def hits_with(fields: Sequence[Field]) -> HitPlaces:
        real = [field.name for field in fields]
        return padded_hits(runner, graph, batch, shape, trials, real=real)

    rowed = [field for field in runner.buffers.fields if field.per is not Extent.FIXED]
    chosen = [field for field in rowed if field.may_write]
    others = [field for field in rowed if not (field.may_write or is_number(field.dtype))]
    unknown = [field for field in others if is_blank(batch[field.name], field)]
    allowed = padded.besides(hits_with(chosen)) if chosen else HitPlaces(())
    if any(is_blank(batch[field.name], field) for field in chosen) and not unknown:
        # Real rows are where padding is. What the other inputs' padding writes is known all the same.
        rest = padded.besides(alone).besides(padded.besides(hits_with(others)))
        allowed = allowed if rest.total < allowed.total else rest
    excused = allowed.totals()
    rows = shape.num_reqs, graph.descriptor.num_reqs
    for place, number in more.items():
        tensor = padded.tensor_at(place)
        if number <= excused.get(place, 0) or (place not in before and _is_of_this_size(tensor, rows[1])):
            continue
        by = [field for field in others if padded.besides(hits_with([field])).totals().get(place)]
        raise CaptureError(_complaint(place, tensor, rows, [field.name for field in by or unknown]))
    return allowed


def _is_of_this_size(tensor: torch.Tensor, rows: int) -> bool:
    """Whether it is a tensor that a step keeps for batches of this size."""
    return rows in tensor.shape and tensor.nbytes == tensor.untyped_storage().nbytes()


def _complaint(place: Place, tensor: torch.Tensor, rows: tuple[int, int], addressed: list[str]) -> str:
    kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    what = f"argument {place}" if isinstance(place, str) else f"a tensor {kind} that outlives the call"
    more = f"{rows[0]} rows padded to {rows[1]} write more of it than {rows[0]} rows"
    told = f"padded rows write to {what}: {more}"
    if not addressed:
        return (
            f"{told}. Where they write follows their number, or what is computed from them: capture a graph "
            f"for every size, so that nothing is padded, or write outside of the step"
        )
    names = " and ".join(addressed)
    pads = ", ".join(f'"{name}": ...' for name in addressed)
    return (
        f"{told}. Where they write follows from {names}, whose padding nobody chose: declare "
        f"pads={{{pads}}} with a place that no real row uses, or capture a graph for every size"
    )


def is_number(dtype: torch.dtype) -> bool:
    """Whether no value of this type is a place."""
    return dtype.is_floating_point or dtype.is_complex


def is_blank(value: torch.Tensor, field: Field) -> bool:
    """Whether an input looks like padding."""
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
