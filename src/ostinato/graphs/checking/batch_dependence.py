"""Finds, during capture, steps whose rows depend on the batch and which therefore must not be padded.

Note [Rows that mix]
The largest number of a batch is the same with padding as without it, unless it is in the padding: one batch
may show no difference although the results of the next are wrong. Replacing the padding by other rows shows
whether rows affect each other at all. If they do, batches are tried in which padding stands out: all rows
alike and near zero, on either side of it, numbers of one sign, and some random ones.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..capturing.captured import CapturedGraph
from ..capturing.gate import turn
from ..capturing.trial import Trials
from ..dispatching.descriptor import BatchDescriptor, BatchShape
from ..dispatching.keys import GraphKey
from ..dispatching.mode import GraphMode
from ..dispatching.step_mode import step_mode
from ..errors import CaptureError
from ..inputs.buffers import Batch
from ..inputs.fields import Extent, Field
from ..journal import WriteJournal, WrittenRegion
from .differences import difference
from .fixed_draws import DrawsAreMixed, FixedDraws
from .padded_writes import HitPlaces, argument_of, is_blank, refuse_writes_of_padding, repeated
from .verify import (
    Verifiable,
    dependence,
    eager_rows,
    on_copies,
    part_of,
    real_rows,
    shapes_to_try,
    unpadded_inputs,
)

Work = Sequence[tuple[Any, str]]
"""The ops of a step in order, with their arguments besides tensors."""

_GROSS = {torch.float64: 1e-6, torch.complex128: 1e-6}
_GROSS_OF_FEW_BITS = 0.1
"""Fraction of an output's norm; a larger difference is not due to rounding."""
_GROSS_IN_FULL, _GROSS_SHORTENED = 3e-4, 1e-2
"""The same for float32 in full precision, and where TF32 is allowed: the batch size may decide which kernel
runs, and so the rounding."""
_FLIPS = 0.02
"""Fraction of integers that rounding may decide, such as the index of the largest of nearly equal numbers.
None in `verify`, and all of them in a batch of a few rows."""


_SEVERAL_EACH = (
    "has several rows for each row of the inputs, but those of one row do not lie behind another's (as "
    "repeat_interleave and view(-1, D) put them; repeat and cat do not), or they depend on the batch, so "
    "padding cannot be cut off: return [rows, k, ...], and flatten it outside"
)
_BY_CHANCE = 6
"""Random batches that are tried if rows mix, for effects that only some numbers show."""
_SMALLEST = 2
"""Number of smallest graphs that are always tried: padding weighs most beside few rows."""


def refuse_dependence_on_the_batch(
    runner: Verifiable, make: Callable[[BatchDescriptor], Batch], works: Mapping[GraphKey, Work]
) -> None:
    """Raises CaptureError, naming the output, if rows of a graph differ grossly from those without padding,
    or if an output has several rows for each of the inputs' and no trial could tell whose come first.

    Tried are the largest graph at half its size, the smallest graphs that are ever padded, and every graph
    that does different work than the next smaller one (`works`), these with the fewest rows that they serve.
    A step that only works at some sizes cannot be compared at others.
    """
    sizes = {graph.descriptor.num_tokens for graph in runner.graphs.values()}
    if len(sizes) == max(sizes):
        return  # each has a graph, and nothing is ever padded
    is_compared = False
    for graph, shape, flips in _worth_a_trial(runner, works):
        given = _unlike_padding(make(shape.as_descriptor()), runner.buffers.fields)
        # Both signs: zeros of padding win where all numbers are negative, or where all are positive.
        negative = {
            name: _times(value, -1.0) if value.is_floating_point() else value for name, value in given.items()
        }
        for batch in (given, negative):
            trials = _refuse_dependence(runner, graph, shape, batch, flips)
        is_compared = is_compared or trials is not None
        if trials is not None and trials.writes:
            for batch in _showing_in_state(given, runner.buffers.fields, shape):
                _refuse_dependence(runner, graph, shape, batch, flips)
        if trials is not None and _rows_mix(runner, graph, shape, given, trials):
            for batch, own_flips in _telling(given, runner.buffers.fields, shape):
                _refuse_dependence(runner, graph, shape, batch, max(flips, own_flips))
    if runner.outputs.with_several_each and not is_compared:
        raise CaptureError(f"{runner.outputs.with_several_each[0]} {_SEVERAL_EACH}")


def _worth_a_trial(
    runner: Verifiable, works: Mapping[GraphKey, Work]
) -> Iterator[tuple[CapturedGraph, BatchShape, float]]:
    """Graphs to try, the rows to try each with, and the fraction of integers that rounding may decide."""
    graphs = sorted(runner.graphs.values(), key=lambda graph: graph.descriptor)
    yield graphs[-1], part_of(shapes_to_try(graphs[-1].descriptor)[0], 2), _FLIPS
    smaller, num_small = None, 0
    for graph in graphs:
        rows, full = smaller.descriptor.num_reqs + 1 if smaller else 1, shapes_to_try(graph.descriptor)[0]
        if rows < full.num_reqs == full.num_tokens:
            num_small += 1
            is_other = smaller is None or not _is_same_work(
                works.get(smaller.key, ()), works.get(graph.key, ()), smaller, graph
            )
            if is_other or num_small <= _SMALLEST:
                yield graph, replace(full, num_tokens=rows, num_reqs=rows), 1.0
        smaller = graph


def _refuse_dependence(
    runner: Verifiable, graph: CapturedGraph, shape: BatchShape, batch: Batch, flips: float
) -> Trials | None:
    """Returns the trials, which know what the step writes; None if it cannot be compared."""
    trials = runner.trials()

    def allowed(dtype: torch.dtype) -> float:
        is_number = dtype.is_floating_point or dtype.is_complex
        return gross(dtype, runner.buffers.device, trials) if is_number else flips

    with turn, step_mode(GraphMode.NONE), torch.inference_mode(False), torch.no_grad():
        try:
            inputs = unpadded_inputs(runner, batch, shape)
            with trials.undone():
                wanted = trials.run_for_good(lambda: on_copies(runner, inputs, shape), counting=True)
                alone = HitPlaces.of(trials.regions, inputs, runner.buffers.fields)
                regions = [region for region in trials.regions if argument_of(region, inputs) is None]
                wanted_state = _contents(regions)
        except Exception:
            return None
        free = refuse_writes_of_padding(runner, graph, batch, shape, trials, alone)
        got, state = _rows_and_state(runner, graph, batch, shape, shape, trials, regions)
        if trials.draws_random:
            # Other sizes draw other numbers. With the same ones other rows in place of the padding must not
            # matter.
            full = shapes_to_try(graph.descriptor)[0]
            among = repeated(batch, runner.buffers.fields, shape, full)
            wanted, wanted_state = _rows_and_state(runner, graph, among, full, shape, trials, regions)
        _, dependent = dependence(runner.outputs.names, got, wanted, allowed)
        if dependent is None and trials.draws_random:
            dependent = _dependent_with_fixed_draws(runner, graph, shape, batch, trials, allowed)
        if dependent is None and _dependent_state(regions, state, wanted_state, free, allowed):
            # What a second replay leaves otherwise (a time, an address) says nothing of the batch.
            _, again = _rows_and_state(runner, graph, batch, shape, shape, trials, regions)
            wanted_state = [
                torch.where(_is_unlike(one, other), one, wanted_one)
                for wanted_one, one, other in zip(wanted_state, state, again, strict=True)
            ]
            dependent = _dependent_state(regions, state, wanted_state, free, allowed)
        if dependent is None:
            return trials
        runner.buffers.fill(batch, shape, graph.descriptor)
        padded = trials.run(lambda: eager_rows(runner, graph, shape))
        _, wrong = dependence(runner.outputs.names, got, padded, allowed)
    if wrong is not None and not trials.draws_random:
        raise CaptureError(f"{wrong} of a replay differs from what the step computes")
    if dependent in runner.outputs.with_several_each:
        raise CaptureError(f"{dependent} {_SEVERAL_EACH}")
    raise CaptureError(
        f"{dependent} depends on the batch: its rows differ when {shape.num_reqs} rows are padded to "
        f"{graph.descriptor.num_reqs}. The step contains a sum, mean or norm over the batch, or its length "
        f"as a number: compute that outside of the step, or capture without padding (a rung for every size)"
    )


def _dependent_with_fixed_draws(
    runner: Verifiable,
    graph: CapturedGraph,
    shape: BatchShape,
    batch: Batch,
    trials: Trials,
    allowed: Callable[[torch.dtype], float],
) -> str | None:
    """The step with padding and without, both eager, as no graph can do it."""
    runner.buffers.fill(batch, shape, graph.descriptor)
    try:
        with FixedDraws():
            padded = trials.run(lambda: eager_rows(runner, graph, shape))
            inputs = unpadded_inputs(runner, batch, shape)
            alone = trials.run(lambda: on_copies(runner, inputs, shape))
    except DrawsAreMixed:
        return None
    return dependence(runner.outputs.names, padded, alone, allowed)[1]


def gross(dtype: torch.dtype, device: torch.device, seen: Trials | WriteJournal) -> float:
    """The largest difference that rounding may cause in numbers of this type, in the runs that were seen."""
    if dtype.itemsize <= 2 or seen.rounds_to_few_bits:  # float32 may be what bfloat16 was widened to
        return _GROSS_OF_FEW_BITS
    if dtype in _GROSS:
        return _GROSS[dtype]
    return _GROSS_SHORTENED if _may_be_shortened(device, seen.work) else _GROSS_IN_FULL


def _may_be_shortened(device: torch.device, work: Work) -> bool:
    """Whether products of float32 may be computed with fewer digits, as torch is set."""
    try:
        if torch.get_float32_matmul_precision() != "highest":
            return True
        if device.type == "cpu" or not torch.backends.cudnn.allow_tf32:
            return False
    except RuntimeError:  # set in torch's newer way, which these questions do not know
        return True
    return any("conv" in str(op) or "cudnn" in str(op) for op, _ in work)


def _rows_mix(
    runner: Verifiable, graph: CapturedGraph, shape: BatchShape, batch: Batch, trials: Trials
) -> bool:
    """Whether rows of a replay change when other rows replace the padding. These are rows of the batch
    itself: if their numbers are places to write to, they are known to be legal, and are restored."""
    full, fields = shapes_to_try(graph.descriptor)[0], runner.buffers.fields
    with turn, step_mode(GraphMode.NONE), torch.inference_mode(False), torch.no_grad():
        last = shape.num_tokens - 1
        fronts = (
            (_all_like(batch, fields, 0, 0.3), 1.0),
            (_all_like(batch, fields, last, 0.3), -1.0),
            (batch, -1.0),
        )
        for front, factor in fronts:
            behind = repeated(_scaled(batch, fields, factor), fields, shape, full)
            alone, _ = _rows_and_state(runner, graph, front, shape, shape, trials, ())
            among, _ = _rows_and_state(
                runner, graph, _in_front(front, behind, fields), full, shape, trials, ()
            )
            for one, other in zip(alone, among, strict=True):
                if isinstance(one, torch.Tensor) and bool(_is_unlike(_wide(one), _wide(other)).any()):
                    return True
    return False


def _telling(batch: Batch, fields: Sequence[Field], shape: BatchShape) -> Iterator[tuple[Batch, float]]:
    """Batches in which padding stands out, see Note [Rows that mix], and the fraction of integers that
    rounding may decide: all of them if rows are alike."""
    for row, factor in ((0, 0.1), (0, -0.1), (1, 0.03), (1, -0.03), (shape.num_tokens - 1, 0.1)):
        yield _all_like(batch, fields, row, factor), 1.0
    of_one_sign = {k: _away_from_zero(v) if v.is_floating_point() else v for k, v in batch.items()}
    for sign in (1.0, -1.0):
        yield _scaled(of_one_sign, fields, sign), _FLIPS
    generator = torch.Generator().manual_seed(0)
    for number in range(_BY_CHANCE):
        yield _each_scaled(batch, fields, generator, with_signs=number % 2 == 1), _FLIPS


def _showing_in_state(batch: Batch, fields: Sequence[Field], shape: BatchShape) -> Iterator[Batch]:
    """Batches in which padding shows in what a step keeps: numbers of one sign for extrema, and, for places,
    rows that all have the same, which is not that of padding."""
    of_one_sign = {k: _away_from_zero(v) if v.is_floating_point() else v for k, v in batch.items()}
    for sign in (1.0, -1.0):
        yield _scaled(of_one_sign, fields, sign)
    indices = [f for f in fields if f.per is not Extent.FIXED and not f.dtype.is_floating_point]
    for row in reversed(range(shape.num_tokens)):
        if indices and not any(is_blank(batch[f.name].select(f.dim, row), f) for f in indices):
            yield _all_like(batch, fields, row, 1.0)
            return


def _each_scaled(
    batch: Batch, fields: Sequence[Field], generator: torch.Generator, *, with_signs: bool
) -> Batch:
    """Multiply each floating row of each input by a different number; `with_signs`: each number by a sign."""
    scaled = dict(batch)
    for field in fields:
        value = batch[field.name]
        if field.per is not Extent.FIXED and value.is_floating_point():
            shape = [1] * value.dim()
            shape[field.dim] = value.size(field.dim)
            factors = torch.randn(shape, generator=generator, device="cpu")
            if with_signs:
                factors = factors * (torch.rand(value.shape, generator=generator, device="cpu") - 0.5).sign()
            scaled[field.name] = (value.double() * factors.to(value.device)).to(value.dtype)
    return scaled


def _all_like(batch: Batch, fields: Sequence[Field], row: int, factor: float) -> Batch:
    """A batch whose rows all equal one of them, floating ones scaled towards zero."""
    alike = dict(batch)
    for field in fields:
        if field.per is not Extent.FIXED:
            value = batch[field.name]
            size = value.size(field.dim)
            index = torch.full((size,), row % size, device=value.device)
            alike[field.name] = value.index_select(field.dim, index)
    return _scaled(alike, fields, factor)


def _scaled(batch: Batch, fields: Sequence[Field], factor: float) -> Batch:
    """The batch with floating rows multiplied."""
    rowed = {field.name for field in fields if field.per is not Extent.FIXED}
    return {
        name: _times(value, factor) if name in rowed and value.is_floating_point() else value
        for name, value in batch.items()
    }


def _in_front(first: Batch, batch: Batch, fields: Sequence[Field]) -> Batch:
    """These rows, followed by those that a larger batch has in the same places."""
    joined = dict(batch)
    for field in fields:
        if field.per is not Extent.FIXED:
            front, whole = first[field.name], batch[field.name]
            rows = front.size(field.dim)
            behind = whole.narrow(field.dim, rows, whole.size(field.dim) - rows)
            joined[field.name] = torch.cat([front, behind], field.dim)
    return joined


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() and value.itemsize == 1 else value


def _away_from_zero(value: torch.Tensor) -> torch.Tensor:
    """Numbers not larger than the largest, and not much smaller than their mean."""
    sizes = value.double().abs()
    return ((sizes + sizes.mean()) / 2).to(value.dtype)


def _times(value: torch.Tensor, factor: float) -> torch.Tensor:
    return value.double().mul(factor).to(value.dtype)  # numbers of eight bits know no arithmetic


def _rows_and_state(
    runner: Verifiable,
    graph: CapturedGraph,
    batch: Batch,
    filled: BatchShape,
    shape: BatchShape,
    trials: Trials,
    regions: Sequence[WrittenRegion],
) -> tuple[list[Any], list[torch.Tensor]]:
    """The first rows of a replay, as many as `shape` has, and the contents that it leaves in the regions."""
    if trials.writes:
        # Another size, or other contents, may be written elsewhere, and only what was seen is undone.
        runner.buffers.fill(batch, filled, graph.descriptor)
        trials.run(lambda: eager_rows(runner, graph, shape))
    with trials.undone():
        runner.buffers.fill(batch, filled, graph.descriptor)
        runner.launch(graph)
        return real_rows(runner, graph.leaves, shape), _contents(regions)


def _is_unlike(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where two tensors differ; NaNs are equal."""
    return (one != other) & ~((one != one) & (other != other))


def _contents(regions: Sequence[WrittenRegion]) -> list[torch.Tensor]:
    return [region.read() for region in regions]


def _dependent_state(
    regions: Sequence[WrittenRegion],
    got: list[torch.Tensor],
    wanted: list[torch.Tensor],
    of_padding: HitPlaces,
    allowed: Callable[[torch.dtype], float],
) -> str | None:
    """The state, of what a step changes, that padding changes differently: a count of rows, a sum over them.
    Left out is what padded rows may write."""
    for region, a, b in zip(regions, got, wanted, strict=True):
        before, free = region.before, of_padding.free(region)
        if free is not None:
            a, b, before = a[free], b[free], before[free]
        if difference(a, b, before) > allowed(b.dtype):
            dtype = str(region.tensor.dtype).removeprefix("torch.")
            return f"what the step leaves in a tensor {dtype}{list(region.tensor.shape)}"
    return None


def _unlike_padding(batch: Batch, fields: Sequence[Field]) -> Batch:
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


_NUMBER = re.compile(r"(\d+)")


def _is_same_work(one: Work, other: Work, smaller: CapturedGraph, larger: CapturedGraph) -> bool:
    """Whether two rungs run the same ops with the same numbers, or with numbers that grow with the batch."""
    m, n = smaller.descriptor.num_tokens, larger.descriptor.num_tokens

    def alike(a: str, b: str) -> bool:
        return a == b or (a.isdigit() and b.isdigit() and int(a) * n == int(b) * m)

    if len(one) != len(other):
        return False
    for (op, given), (other_op, other_given) in zip(one, other, strict=True):
        if op is not other_op:
            return False
        if given != other_given:
            parts, others = _NUMBER.split(given), _NUMBER.split(other_given)
            if len(parts) != len(others) or not all(map(alike, parts, others)):
                return False
    return True
