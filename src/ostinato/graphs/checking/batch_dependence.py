"""Finds, during capture, steps whose rows depend on the batch and which therefore must not be padded."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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
from ..inputs.fields import Field
from ..journal import WrittenRegion
from .differences import gross
from .fixed_draws import DrawsAreMixed, FixedDraws
from .padded_writes import (
    HitPlaces,
    argument_of,
    refuse_writes_of_padding,
    without_a_place,
    without_writes_of_padding,
)
from .telling_batches import (
    FLIPS,
    all_like,
    in_front,
    repeated,
    scaled,
    showing_in_state,
    telling,
    times,
    unlike_padding,
)
from .trial_rows import (
    Verifiable,
    dependence,
    eager_rows,
    on_copies,
    part_of,
    real_rows,
    shapes_to_try,
    unpadded_inputs,
)
from .verify import dependent_state

Work = Sequence[tuple[Any, str]]
"""The ops of a step in order, with their arguments besides tensors."""

_SEVERAL_EACH = (
    "has several rows for each row of the inputs, but those of one row do not lie behind another's (as "
    "repeat_interleave and view(-1, D) put them; repeat and cat do not), or they depend on the batch, so "
    "padding cannot be cut off: return [rows, k, ...], and flatten it outside"
)
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
    fields, is_compared = runner.buffers.fields, False
    whole = make(max(graph.descriptor for graph in runner.graphs.values()))
    unknown = without_a_place(whole, fields)
    for graph, shape, flips in _worth_a_trial(runner, works):
        given = unlike_padding(make(shape.as_descriptor()), runner.buffers.fields)
        # Both signs: zeros of padding win where all numbers are negative, or where all are positive.
        negative = {
            name: times(value, -1.0) if value.is_floating_point() else value for name, value in given.items()
        }
        tried: _Tried | None = None
        for batch in (given, negative):
            # What writes nothing need not be watched with padding again.
            known = tried.of_padding if tried is not None and not tried.trials.writes else None
            tried = _refuse_dependence(runner, graph, shape, batch, flips, unknown=unknown, known=known)
        is_compared = is_compared or tried is not None
        if tried is not None and tried.trials.writes:
            for batch in showing_in_state(given, whole, fields):
                _refuse_dependence(runner, graph, shape, batch, flips)
        if tried is not None and _rows_mix(runner, graph, shape, given, tried.trials):
            for batch, own_flips in telling(given, runner.buffers.fields, shape):
                _refuse_dependence(runner, graph, shape, batch, max(flips, own_flips), known=tried.of_padding)
    if runner.outputs.with_several_each and not is_compared:
        raise CaptureError(f"{runner.outputs.with_several_each[0]} {_SEVERAL_EACH}")


def _worth_a_trial(
    runner: Verifiable, works: Mapping[GraphKey, Work]
) -> Iterator[tuple[CapturedGraph, BatchShape, float]]:
    """Graphs to try, the rows to try each with, and the fraction of integers that rounding may decide."""
    graphs = sorted(runner.graphs.values(), key=lambda graph: graph.descriptor)
    yield graphs[-1], part_of(shapes_to_try(graphs[-1].descriptor)[0], 2), FLIPS
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


class _Tried(NamedTuple):
    """Trials that showed no dependence, and what padded rows may write."""

    trials: Trials
    of_padding: HitPlaces


def _refuse_dependence(
    runner: Verifiable,
    graph: CapturedGraph,
    shape: BatchShape,
    batch: Batch,
    flips: float,
    *,
    unknown: Sequence[str] = (),
    known: HitPlaces | None = None,
) -> _Tried | None:
    """Returns the trials, which know what the step writes; None if it cannot be compared.

    `known`: what padded rows may write, if state has been compared before and need not be again.
    """
    trials = runner.trials()

    def allowed(dtype: torch.dtype) -> float:
        is_number = dtype.is_floating_point or dtype.is_complex
        return gross(dtype, runner.buffers.device, trials) if is_number else flips

    with turn, step_mode(GraphMode.NONE), torch.inference_mode(False), torch.no_grad():
        try:
            inputs = unpadded_inputs(runner, batch, shape)
            with trials.undone():
                wanted = trials.run_for_good(lambda: on_copies(runner, inputs, shape), counting=known is None)
                alone = HitPlaces.of(trials.regions, inputs, runner.buffers.fields)
                regions = [region for region in trials.regions if argument_of(region, inputs) is None]
                regions = regions if known is None else []
                wanted_state = _contents(regions)
        except Exception:
            return None
        free = known
        if free is None:
            free = refuse_writes_of_padding(runner, graph, batch, shape, trials, alone, unknown)
        got, state = _rows_and_state(runner, graph, batch, shape, shape, trials, regions)
        if trials.draws_random:
            # Other sizes draw other numbers. With the same ones other rows in place of the padding must not
            # matter.
            full = shapes_to_try(graph.descriptor)[0]
            among = repeated(batch, runner.buffers.fields, shape, full)
            wanted, wanted_state = _rows_and_state(runner, graph, among, full, shape, trials, regions)
        got = without_writes_of_padding(runner, graph, free, got, wanted)
        _, dependent = dependence(runner.outputs.names, got, wanted, allowed)
        if dependent is None and trials.draws_random:
            dependent = _dependent_with_fixed_draws(runner, graph, shape, batch, trials, allowed)
        if dependent is None and dependent_state(regions, state, wanted_state, free, allowed):
            # What a second replay leaves otherwise (a time, an address) says nothing of the batch.
            _, again = _rows_and_state(runner, graph, batch, shape, shape, trials, regions)
            wanted_state = [
                torch.where(_is_unlike(one, other), one, wanted_one)
                for wanted_one, one, other in zip(wanted_state, state, again, strict=True)
            ]
            dependent = dependent_state(regions, state, wanted_state, free, allowed)
        if dependent is None:
            return _Tried(trials, free)
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
        f"{_of_groups(runner.buffers.fields, batch)}"
    )


def _of_groups(fields: Sequence[Field], batch: Batch) -> str:
    """The remedy where rows may be grouped by an index, and real rows are in the group of padding."""
    names = [name for name in without_a_place(batch, fields) if batch[name].dtype is not torch.bool]
    if not names:
        return ""
    pads = ", ".join(f'"{name}": ...' for name in names)
    by = " or ".join(names)
    return f". If rows are grouped by {by}, declare pads={{{pads}}} with a value of no real row"


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


def _rows_mix(
    runner: Verifiable, graph: CapturedGraph, shape: BatchShape, batch: Batch, trials: Trials
) -> bool:
    """Whether rows of a replay change when other rows replace the padding. These are rows of the batch
    itself: if their numbers are places to write to, they are known to be legal, and are restored."""
    full, fields = shapes_to_try(graph.descriptor)[0], runner.buffers.fields
    with turn, step_mode(GraphMode.NONE), torch.inference_mode(False), torch.no_grad():
        last = shape.num_tokens - 1
        fronts = (
            (all_like(batch, fields, 0, 0.3), 1.0),
            (all_like(batch, fields, last, 0.3), -1.0),
            (batch, -1.0),
        )
        for front, factor in fronts:
            behind = repeated(scaled(batch, fields, factor), fields, shape, full)
            alone, _ = _rows_and_state(runner, graph, front, shape, shape, trials, ())
            among, _ = _rows_and_state(
                runner, graph, in_front(front, behind, fields), full, shape, trials, ()
            )
            for one, other in zip(alone, among, strict=True):
                if isinstance(one, torch.Tensor) and bool(_is_unlike(_wide(one), _wide(other)).any()):
                    return True
    return False


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() and value.itemsize == 1 else value


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
