"""Finds padded rows that write where a caller keeps something: a cache, a table of what was seen, a count.

Padded rows are computed like any other, so whatever they hold as an index is a place that they write to. That
is harmless only if nobody uses this place, and only the caller can say so, by choosing the padding himself.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..capturing.captured import CapturedGraph
from ..capturing.trial import Trials
from ..dispatching.descriptor import BatchShape
from ..errors import CaptureError
from ..inputs.buffers import Batch
from ..inputs.fields import Extent, Field
from ..journal import Hits, WrittenRegion
from ..memory import byte_range, storage_address
from .telling_batches import is_blank, is_number, padded_batch
from .trial_rows import Verifiable, eager_rows, shapes_to_try

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
            is_single = region.tensor.dim() == 0  # has no places: what it holds afterwards is compared
            if region.hits is not None and name not in has_rows and not is_single:
                found.append((storage_address(region.tensor) if name is None else name, region.hits))
        return cls(found)

    def totals(self, *, opaque: bool = False) -> dict[Place, int]:
        """The number of entries that wrote to each place, by operators of torch's or by others."""
        totals: dict[Place, int] = {}
        for place, hit in self.hits:
            if hit.is_opaque == opaque:
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
            found.append((place, one._replace(counts=more)))
        return HitPlaces(found)

    @property
    def total(self) -> int:
        """The number of entries that wrote."""
        return sum(hit.total for _, hit in self.hits)

    def tensor_at(self, place: Place) -> torch.Tensor:
        """The tensor by which a place was written first."""
        return next(hit.tensor for at, hit in self.hits if at == place)

    def free(self, region: WrittenRegion) -> torch.Tensor | None:
        """Which elements of a region depend on nothing but real rows and their order; None if all do. Not
        those that these entries wrote, nor what several entries of the same call did."""
        free: torch.Tensor | None = None
        address = storage_address(region.tensor)
        if ours := [hit for place, hit in self.hits if place == address and hit.total]:
            if region.rows is not None and all(_is_same_view(hit.tensor, region.tensor) for hit in ours):
                by_row = [
                    (hit.counts == 0).expand(hit.tensor.shape) for hit in ours if hit.counts is not None
                ]
                free = torch.stack([region.rows.read(each) for each in by_row]).all(0)
            else:
                free = _painted(ours, region)
        if region.hits is not None and region.hits.is_opaque and region.hits.counts is not None:
            changed = region.hits.counts > 0
            return changed if free is None else free & changed
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


def _is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and (one.shape, one.stride()) == (other.shape, other.stride())


def _painted(hits: Sequence[Hits], region: WrittenRegion) -> torch.Tensor:
    """The elements of a region that none of these hit, by a mask over the whole storage."""
    storage, size = region.tensor.untyped_storage(), region.tensor.itemsize
    flat = torch.ones(storage.nbytes() // size, dtype=torch.bool, device=storage.device)
    for hit in hits:
        assert hit.counts is not None
        _as(hit.tensor, flat).masked_fill_(hit.counts > 0, False)
    free = _as(region.tensor, flat)
    return free.clone() if region.rows is None else region.rows.read(free)


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
    unknown: Sequence[str] = (),
) -> HitPlaces:
    """Raises CaptureError if padded rows write more than real rows do alone, unless they write where padding
    that the caller chose says. Returns what they write there.

    `unknown`: inputs whose values are all those of padding, in all rows that there are.
    """
    padded = padded_hits(runner, graph, batch, shape, trials)
    before, now = alone.totals(), padded.totals()
    more = {place: number - before.get(place, 0) for place, number in now.items()}
    more = {place: number for place, number in more.items() if number > 0}
    rowed = [field for field in runner.buffers.fields if field.per is not Extent.FIXED]
    others = [field for field in rowed if not (field.may_write or is_number(field.dtype))]
    blank = [field.name for field in others if is_blank(batch[field.name], field)]
    rows = shape.num_reqs, graph.descriptor.num_reqs
    if unknown and (masked := [hit.tensor for _, hit in padded.hits if hit.is_masked]):
        names = " and ".join(unknown)
        raise CaptureError(
            f"padded rows may write to {_described(masked[0])} that outlives the call: that cannot be "
            f"known, because in {names} all rows of the example hold what padding holds: capture with other "
            f"values, declare pads= for {names}, or capture a graph for every size"
        )
    opaque = padded.totals(opaque=True)
    if not (more or opaque):
        return HitPlaces(())

    def hits_with(fields: Sequence[Field]) -> HitPlaces:
        real = [field.name for field in fields]
        return padded_hits(runner, graph, batch, shape, trials, real=real)

    chosen = [field for field in rowed if field.may_write]
    allowed = padded.besides(hits_with(chosen)) if chosen else HitPlaces(())
    if any(is_blank(batch[field.name], field) for field in chosen) and not blank:
        # Real rows are where padding is. What the other inputs' padding writes is known all the same.
        rest = padded.besides(alone).besides(padded.besides(hits_with(others)))
        allowed = allowed if rest.total < allowed.total else rest
    excused = allowed.totals()
    for place, number in more.items():
        tensor = padded.tensor_at(place)
        if number <= excused.get(place, 0) or (place not in before and _is_of_this_size(tensor, rows[1])):
            continue
        by = [field for field in others if padded.besides(hits_with([field])).totals().get(place)]
        raise CaptureError(_complaint(place, tensor, rows, [field.name for field in by] or blank))
    for field in others if opaque else ():
        # Memory to work in is written whatever rows hold, and what it held does not matter.
        by_field = padded.besides(hits_with([field])).besides(alone).totals(opaque=True)
        for place in (place for place, number in by_field.items() if number):
            raise CaptureError(_complaint(place, padded.tensor_at(place), rows, [field.name]))
    return allowed


def without_writes_of_padding(
    runner: Verifiable,
    graph: CapturedGraph,
    of_padding: HitPlaces,
    got: Sequence[Any],
    wanted: Sequence[Any],
) -> list[Any]:
    """The results of a replay with what is wanted where padded rows may write: in an argument without rows
    that the step writes in place, and which is therefore among its results."""
    views, results = runner.buffers.views(graph.descriptor), list(got)
    for name, view in views.items():
        hits = [hit for place, hit in of_padding.hits if place == name and hit.total]
        for at, leaf in enumerate(graph.leaves if hits and len(got) == len(wanted) else ()):
            if isinstance(leaf, torch.Tensor) and _is_same_view(leaf, view) and got[at].shape == view.shape:
                free = _painted(hits, WrittenRegion(view, view))
                results[at] = torch.where(free, got[at], wanted[at])
    return results


def without_a_place(batch: Batch, fields: Sequence[Field]) -> list[str]:
    """Inputs that may be places, whose padding nobody chose, and which look like padding in all rows."""
    return [
        field.name
        for field in fields
        if field.per is not Extent.FIXED
        and not (field.may_write or is_number(field.dtype))
        and is_blank(batch[field.name], field)
    ]


def _is_of_this_size(tensor: torch.Tensor, rows: int) -> bool:
    """Returns whether it is a tensor that a step keeps for batches of this size."""
    return rows in tensor.shape and tensor.nbytes == tensor.untyped_storage().nbytes()


def _described(tensor: torch.Tensor) -> str:
    return f"a tensor {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _complaint(place: Place, tensor: torch.Tensor, rows: tuple[int, int], addressed: list[str]) -> str:
    what = f"argument {place}" if isinstance(place, str) else f"{_described(tensor)} that outlives the call"
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
