"""Compares every graph with the eager step, on fresh inputs, with plain and with poisoned padding.

Graph and eager step are compared at the same padded shape: a padded and an unpadded matrix product are
different computations, and their difference is not an error of the graph. Real rows are also compared with
the *unpadded* eager step, less strictly: a step whose rows depend on how many there are must not be padded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..capturing.captured import CapturedGraph
from ..capturing.gate import turn
from ..capturing.trial import Trials
from ..dispatching.descriptor import BatchDescriptor, BatchShape
from ..dispatching.keys import GraphKey
from ..dispatching.mode import GraphMode
from ..dispatching.step_mode import step_mode
from ..errors import VerifyError
from ..inputs.buffers import Batch, InputBuffers
from ..inputs.fields import Field
from ..trees import leaves_of
from ..trimming import Trimmer, same_constant
from .differences import difference

if TYPE_CHECKING:
    from rich.table import Table

MakeBatch = Callable[[BatchShape, torch.Generator], Batch]

TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 1e-2,
    torch.complex128: 1e-9,
    torch.complex64: 1e-5,
}
"""Largest error, relative to 1 + |reference|, by type. Integers and booleans must be equal."""

UNPADDED = 10
"""How many times larger the error of the unpadded step may be: other shapes add up in another order."""

_SMALLEST = 1e-5
"""Numbers of results that are smaller are not told from zero."""


class Verifiable(Protocol):
    """What verification needs from a runner."""

    step: Callable[..., Any]
    buffers: InputBuffers
    graphs: dict[GraphKey, CapturedGraph]
    sinks: dict[str, torch.Tensor]
    outputs: Trimmer

    def arguments(
        self, inputs: Mapping[str, torch.Tensor], descriptor: BatchDescriptor
    ) -> dict[str, Any]: ...

    def trials(self) -> Trials: ...

    def launch(self, graph: CapturedGraph) -> None: ...

    def poison_surroundings(self) -> None: ...


@dataclass(frozen=True)
class Check:
    """One graph and one batch: how far replay and eager step differ, and what poison changed."""

    mode: str
    descriptor: str
    batch: str
    error: float
    """Error of the replay against the eager step at the same padded shape."""
    poison_error: float
    """Error of the replay with poisoned padding against the plain replay."""
    unpadded_error: float
    """Error of the replay against the eager step without padding, relative to the norm of that output; of the
    worst output."""
    depends_on_batch: str | None
    """The output whose real rows differ without padding, if there is one."""
    passed: bool


@dataclass(frozen=True)
class Verification:
    """The outcome of `verify`."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    @property
    def max_error(self) -> dict[str, float]:
        """The largest error of each graph."""
        errors: dict[str, float] = {}
        for check in self.checks:
            name = f"{check.mode} {check.descriptor}"
            errors[name] = max(errors.get(name, 0.0), check.error, check.poison_error)
        return errors

    def table(self) -> "Table":
        """The outcome as a `rich` table."""
        from rich.table import Table

        table = Table(title="replay against eager", title_justify="left")
        for heading in ("mode", "graph", "batch", "error", "poisoned", "unpadded", ""):
            is_text = heading in ("mode", "graph", "batch", "")
            table.add_column(heading, justify="left" if is_text else "right")
        for check in self.checks:
            errors = (check.error, check.poison_error, check.unpadded_error)
            verdict = "ok" if check.passed else "FAILED"
            table.add_row(check.mode, check.descriptor, check.batch, *(f"{e:.1e}" for e in errors), verdict)
        return table


def verify(
    runner: Verifiable,
    *,
    make_batch: MakeBatch | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> Verification:
    """Check every captured graph with a full batch and with a batch that is mostly padding.

    `make_batch`: makes inputs for a shape (default: normally distributed numbers, and integers from each
    field's `sample` range). `tolerance`: replaces the tolerances by type. Raises VerifyError if a check
    fails. State that the step changes is restored.
    """
    generator = torch.Generator().manual_seed(seed)
    blank = [field.name for field in runner.buffers.fields if not _can_be_drawn(field)]
    compares_unpadded = make_batch is not None or not blank
    make = make_batch or (lambda shape, generator: random_batch(runner.buffers.fields, shape, generator))
    sinks = {name: sink.clone() for name, sink in runner.sinks.items()}
    with turn, step_mode(GraphMode.NONE), torch.inference_mode(False), torch.no_grad():
        try:
            checks = [
                _check(runner, graph, shape, make(shape, generator), tolerance, compares_unpadded)
                for graph in runner.graphs.values()
                for shape in shapes_to_try(graph.descriptor)
            ]
        finally:
            for name, sink in runner.sinks.items():
                sink.copy_(sinks[name])
    outcome = Verification(tuple(checks))
    if not outcome.passed:
        raise VerifyError(_complaint(outcome))
    return outcome


def shapes_to_try(descriptor: BatchDescriptor) -> list[BatchShape]:
    """A full batch, and one that is mostly padding."""
    full = BatchShape(
        descriptor.num_tokens,
        descriptor.num_reqs,
        descriptor.query_len,
        lora=descriptor.lora,
        context=descriptor.context or 0,
        cascade=descriptor.cascade,
        extra=descriptor.extra,
    )
    return [full] if 1 in (full.num_reqs, full.num_tokens) else [full, part_of(full, 3)]


def part_of(full: BatchShape, times: int) -> BatchShape:
    reqs = max(1, full.num_reqs // times)
    tokens = reqs * full.query_len if full.query_len else max(reqs, full.num_tokens // times)
    return replace(full, num_tokens=tokens, num_reqs=reqs)


def random_batch(fields: tuple[Field, ...], shape: BatchShape, generator: torch.Generator) -> Batch:
    """Random values for every field, on the host."""
    return {field.name: _random_values(field, shape, generator) for field in fields}


def _can_be_drawn(field: Field) -> bool:
    return not (field.sample is None and field.dtype is not torch.bool and _is_integer(field.dtype))


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _random_values(field: Field, shape: BatchShape, generator: torch.Generator) -> torch.Tensor:
    size = field.full_shape(shape.num_tokens, shape.num_reqs)
    if field.dtype.is_floating_point or field.dtype.is_complex:
        return torch.randn(size, generator=generator, device="cpu").to(field.dtype)
    if field.dtype is torch.bool:
        return torch.rand(size, generator=generator, device="cpu") < 0.5
    if field.sample is None:
        return torch.full(size, field.pad, dtype=field.dtype, device="cpu")
    return torch.randint(*field.sample, size, generator=generator, dtype=field.dtype, device="cpu")


def _check(
    runner: Verifiable,
    graph: CapturedGraph,
    shape: BatchShape,
    batch: Batch,
    tolerance: float | None,
    compares_unpadded: bool,
) -> Check:
    descriptor = graph.descriptor
    trials, poisoned_trials = runner.trials(), runner.trials()
    runner.buffers.fill(batch, shape, descriptor)
    expected = trials.run(lambda: eager_rows(runner, graph, shape))
    plain = replayed_rows(runner, graph, batch, shape, trials, poison=False)
    # Poisoned padding may write elsewhere than plain padding: observe that, too, before the replay does.
    runner.buffers.fill(batch, shape, descriptor, poison=True)
    poisoned_trials.run(lambda: eager_rows(runner, graph, shape))
    poisoned = replayed_rows(runner, graph, batch, shape, poisoned_trials, poison=True)
    error, passed = _distance(plain, expected, tolerance)
    poison_error, poison_passed = _distance(poisoned, plain, tolerance)
    unpadded_error, dependent = 0.0, None
    # Real rows full of padding collide with it, and a step that is told its descriptor may well do something
    # else for another one.
    is_padded = compares_unpadded and shape != shapes_to_try(descriptor)[0]
    if passed and is_padded and not runner.arguments({}, descriptor) and not trials.draws_random:
        unpadded = runner.trials().run(
            lambda: on_copies(runner, unpadded_inputs(runner, batch, shape), shape)
        )
        allowed = _allowed_unpadded(tolerance)
        unpadded_error, dependent = dependence(runner.outputs.names, plain, unpadded, allowed)
    return Check(
        str(graph.key.mode),
        str(descriptor),
        str(shape),
        error,
        poison_error,
        unpadded_error,
        dependent,
        passed=passed and poison_passed and dependent is None,
    )


def replayed_rows(
    runner: Verifiable, graph: CapturedGraph, batch: Batch, shape: BatchShape, trials: Trials, *, poison: bool
) -> list[Any]:
    with trials.undone():
        runner.buffers.fill(batch, shape, graph.descriptor, poison=poison)
        if poison:
            runner.poison_surroundings()
        runner.launch(graph)
        return real_rows(runner, graph.leaves, shape)


def eager_rows(runner: Verifiable, graph: CapturedGraph, shape: BatchShape) -> list[Any]:
    """The real rows of the eager step on the contents of the buffers."""
    inputs = runner.buffers.views(graph.descriptor)
    leaves = leaves_of(runner.step(**runner.arguments(inputs, graph.descriptor)))
    if len(leaves) != len(graph.leaves):
        raise VerifyError(
            f"the eager step returns {len(leaves)} values, but the graph for {graph.descriptor} returns "
            f"{len(graph.leaves)}: the step has changed since the capture; capture again"
        )
    return real_rows(runner, leaves, shape)


def unpadded_inputs(runner: Verifiable, batch: Batch, shape: BatchShape) -> dict[str, torch.Tensor]:
    """The batch on the device, without padding, in copies: the step may write into its inputs."""
    return {name: tensor.clone() for name, tensor in runner.buffers.on_device(batch, shape).items()}


def on_copies(runner: Verifiable, inputs: Mapping[str, torch.Tensor], shape: BatchShape) -> list[Any]:
    """What the eager step returns for inputs of its own."""
    leaves = leaves_of(runner.step(**runner.arguments(inputs, shape.as_descriptor())))
    return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def real_rows(runner: Verifiable, leaves: list[Any], shape: BatchShape) -> list[Any]:
    return [
        runner.outputs.trim(position, leaf, shape).clone() if isinstance(leaf, torch.Tensor) else leaf
        for position, leaf in enumerate(leaves)
    ]


def _allowed_unpadded(tolerance: float | None) -> Callable[[torch.dtype], float]:
    return lambda dtype: UNPADDED * max(TOLERANCES.get(dtype, 0.0), tolerance or 0.0)


def dependence(
    names: list[str], got: list[Any], unpadded: list[Any], allowed: Callable[[torch.dtype], float]
) -> tuple[float, str | None]:
    """The largest difference, and the first output that differs by more than allowed."""
    if len(got) != len(unpadded):
        return float("inf"), "the structure of the output"
    worst, dependent = 0.0, None
    for name, a, b in zip(names, got, unpadded, strict=True):
        if not isinstance(a, torch.Tensor):
            off, limit = (0.0 if same_constant(a, b) else float("inf")), 0.0
        else:
            off = difference(a, b, floor=_SMALLEST)
            limit = allowed(a.dtype)
        worst, dependent = max(worst, off), dependent or (name if off > limit else None)
    return worst, dependent


def _distance(got: list[Any], expected: list[Any], tolerance: float | None) -> tuple[float, bool]:
    """The largest error over all outputs, and whether each is within its tolerance."""
    worst, passed = 0.0, len(got) == len(expected)
    for a, b in zip(got, expected, strict=False):
        if not isinstance(a, torch.Tensor):
            passed &= same_constant(a, b)
            continue
        error = _tensor_distance(a, b)
        allowed = TOLERANCES.get(a.dtype, 0.0) if tolerance is None else tolerance
        worst, passed = max(worst, error), passed and error <= allowed
    return worst, passed


def _tensor_distance(a: torch.Tensor, b: Any) -> float:
    if not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    both_nan = a.isnan() & b.isnan()
    error = torch.where((a == b) | both_nan, 0.0, (a - b).abs() / (1 + b.abs()))
    largest = float(error.max())
    return float("inf") if largest != largest else largest


def _complaint(outcome: Verification) -> str:
    failed = [check for check in outcome.checks if not check.passed]
    lines = [
        f"{check.mode} {check.descriptor} with {check.batch}: error {check.error:.3g}, "
        f"under poison {check.poison_error:.3g}, without padding {check.unpadded_error:.3g}"
        + (f": {check.depends_on_batch} depends on the batch" if check.depends_on_batch else "")
        for check in failed
    ]
    hint = ""
    if any(check.poison_error > check.error for check in failed):
        hint = "\nAn error under poison means that real rows depend on padded rows: the step mixes rows."
    return f"{len(failed)} of {len(outcome.checks)} checks failed:\n  " + "\n  ".join(lines) + hint
