"""Every graph against the eager step, on fresh inputs, plain and poisoned.

Graph and eager are compared at the same padded shape: a padded and an unpadded matrix product are two
different computations whose difference is no fault of a graph.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from ..capturing.captured import CapturedGraph
from ..capturing.trial import Trials
from ..dispatching.descriptor import BatchDescriptor, BatchShape
from ..errors import VerifyError
from ..inputs.buffers import Batch
from ..inputs.fields import Field

if TYPE_CHECKING:
    from rich.table import Table

    from ..runner import CudaGraphRunner

MakeBatch = Callable[[BatchShape, torch.Generator], Batch]

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Largest error, relative to 1 + |reference|, by type. Integers and booleans must be equal."""


@dataclass(frozen=True)
class Check:
    """One graph, one batch: how far replay and eager are apart, and what poison changed."""

    mode: str
    descriptor: str
    batch: str
    error: float
    """Replay against eager at the same padded shape."""
    poison_error: float
    """Replay with poisoned padding against the plain replay."""
    passed: bool


@dataclass(frozen=True)
class Verification:
    """The outcome of `verify`."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every check did."""
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
        """The outcome as something `rich` prints."""
        from rich.table import Table

        table = Table(title="replay against eager", title_justify="left")
        for heading in ("mode", "graph", "batch", "error", "error under poison", ""):
            table.add_column(heading, justify="right" if heading.startswith("error") else "left")
        for check in self.checks:
            verdict = "ok" if check.passed else "FAILED"
            errors = (f"{check.error:.2e}", f"{check.poison_error:.2e}")
            table.add_row(check.mode, check.descriptor, check.batch, *errors, verdict)
        return table


def verify(
    runner: "CudaGraphRunner",
    *,
    make_batch: MakeBatch | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> Verification:
    """Check every captured graph with a full batch and with a batch that is mostly padding.

    `make_batch`: makes inputs of a shape (default: normal numbers, and integers from each field's
    `sample` range). `tolerance`: instead of the one for each type. Raises VerifyError if any check fails.
    State that the step changes is put back.
    """
    generator = torch.Generator().manual_seed(seed)
    make = make_batch or (lambda shape, generator: random_batch(runner.buffers.fields, shape, generator))
    checks = [
        _check(runner, graph, shape, make(shape, generator), tolerance)
        for graph in runner.graphs.values()
        for shape in shapes_to_try(graph.descriptor)
    ]
    outcome = Verification(tuple(checks))
    if not outcome.passed:
        raise VerifyError(_complaint(outcome))
    return outcome


def shapes_to_try(descriptor: BatchDescriptor) -> list[BatchShape]:
    """A full batch, and one that is mostly padding."""
    limits: dict[str, Any] = {
        "lora": descriptor.lora,
        "cascade": descriptor.cascade,
        "context": descriptor.context or 0,
        "extra": descriptor.extra,
    }
    full = BatchShape(descriptor.num_tokens, descriptor.num_reqs, descriptor.query_len, **limits)
    if descriptor.num_reqs == 1 or descriptor.num_tokens == 1:
        return [full]
    if descriptor.query_len is not None:
        reqs = max(1, descriptor.num_reqs // 3)
        return [full, BatchShape(reqs * descriptor.query_len, reqs, descriptor.query_len, **limits)]
    tokens = max(1, descriptor.num_tokens // 3)
    return [full, BatchShape(tokens, min(tokens, max(1, descriptor.num_reqs // 3)), None, **limits)]


def random_batch(fields: tuple[Field, ...], shape: BatchShape, generator: torch.Generator) -> Batch:
    """Random values for every field, on the host."""
    return {field.name: _random_values(field, shape, generator) for field in fields}


def _random_values(field: Field, shape: BatchShape, generator: torch.Generator) -> torch.Tensor:
    size = field.full_shape(shape.num_tokens, shape.num_reqs)
    if field.dtype.is_floating_point or field.dtype.is_complex:
        return torch.randn(size, generator=generator).to(field.dtype)
    if field.dtype is torch.bool:
        return torch.rand(size, generator=generator) < 0.5
    if field.sample is None:
        return torch.full(size, field.pad, dtype=field.dtype)
    return torch.randint(*field.sample, size, generator=generator, dtype=field.dtype)


def _check(
    runner: "CudaGraphRunner",
    graph: CapturedGraph,
    shape: BatchShape,
    batch: Batch,
    tolerance: float | None,
) -> Check:
    with torch.inference_mode(False), torch.no_grad(), _sinks_kept(runner):
        inputs = runner.buffers.views(graph.descriptor)
        trials = runner.trials()

        def replay(trials: Trials, poison: bool) -> list[Any]:
            with trials.undone():
                runner.buffers.fill(batch, shape, graph.descriptor, poison=poison)
                if poison:
                    runner.poison_surroundings()
                runner.launch(graph)
                return _real_rows(runner, tree_leaves(graph.recorded.output), shape)

        def eager() -> list[Any]:
            leaves = tree_leaves(runner.step(**runner.arguments(inputs, graph.descriptor)))
            if len(leaves) != len(graph.leaves):
                raise VerifyError(
                    f"the eager step returns {len(leaves)} values, the graph of {graph.descriptor} "
                    f"{len(graph.leaves)}: it no longer does what was captured"
                )
            return _real_rows(runner, leaves, shape)

        runner.buffers.fill(batch, shape, graph.descriptor)
        expected = trials.run(eager)
        plain = replay(trials, poison=False)
        # Poisoned padding may write elsewhere than plain padding: observe that, too, before the replay does.
        poisoned_trials = runner.trials()
        runner.buffers.fill(batch, shape, graph.descriptor, poison=True)
        poisoned_trials.run(eager)
        poisoned = replay(poisoned_trials, poison=True)
    error, passed = _distance(plain, expected, tolerance)
    poison_error, poison_passed = _distance(poisoned, plain, tolerance)
    return Check(
        mode=str(graph.key.mode),
        descriptor=str(graph.descriptor),
        batch=str(shape),
        error=error,
        poison_error=poison_error,
        passed=passed and poison_passed,
    )


@contextmanager
def _sinks_kept(runner: "CudaGraphRunner") -> Iterator[None]:
    saved = {name: sink.clone() for name, sink in runner.sinks.items()}
    try:
        yield
    finally:
        for name, sink in runner.sinks.items():
            sink.copy_(saved[name])


def _real_rows(runner: "CudaGraphRunner", leaves: list[Any], shape: BatchShape) -> list[Any]:
    return [
        runner.trim(position, leaf, shape).clone() if isinstance(leaf, torch.Tensor) else leaf
        for position, leaf in enumerate(leaves)
    ]


def _distance(got: list[Any], expected: list[Any], tolerance: float | None) -> tuple[float, bool]:
    """The largest error over all outputs, and whether each is within its tolerance."""
    worst, passed = 0.0, len(got) == len(expected)
    for a, b in zip(got, expected, strict=False):
        if not isinstance(a, torch.Tensor):
            passed &= a == b
            continue
        error = _tensor_distance(a, b)
        allowed = TOLERANCES.get(a.dtype, 0.0) if tolerance is None else tolerance
        worst, passed = max(worst, error), passed and error <= allowed
    return worst, passed


def _tensor_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
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
        f"under poison {check.poison_error:.3g}"
        for check in failed
    ]
    hint = ""
    if any(check.poison_error > check.error for check in failed):
        hint = "\nA change under poison means that real rows depend on padded rows: the step mixes rows."
    return f"{len(failed)} of {len(outcome.checks)} checks failed:\n  " + "\n  ".join(lines) + hint
