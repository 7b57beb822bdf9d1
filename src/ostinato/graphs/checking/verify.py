"""Compares every graph with the eager step, on fresh inputs, with plain and with poisoned padding.

Graph and eager step are compared at the same padded shape: a padded and an unpadded matrix product are
different computations, and their difference is not an error of the graph. Real rows are also compared with
the *unpadded* eager step, less strictly: a step whose rows depend on how many there are must not be padded.

Note [Rows that see padding]
A step whose results change under poison may be right all the same: zeros add nothing to a sum over rows, and
are never the largest of sizes. Poison shows that rows see each other. Whether they see the padding that is
really there is tried with batches beside which it would stand out. Only an owner who declares that rows are
independent is held to it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ..capturing.captured import CapturedGraph
from ..capturing.gate import turn
from ..capturing.trial import Trials
from ..dispatching.descriptor import BatchDescriptor, BatchShape
from ..dispatching.keys import GraphKey
from ..dispatching.mode import GraphMode
from ..dispatching.step_mode import step_mode
from ..errors import CaptureError, VerifyError
from ..inputs.buffers import Batch
from ..inputs.fields import Field
from ..journal import WrittenRegion
from ..trimming import same_constant
from .differences import difference, gross
from .fixed_draws import DrawsAreMixed, FixedDraws
from .padded_writes import HitPlaces, argument_of, refuse_writes_of_padding, without_writes_of_padding
from .telling_batches import telling
from .trial_rows import (
    Verifiable,
    dependence,
    eager_rows,
    on_copies,
    real_rows,
    shapes_to_try,
    unpadded_inputs,
)

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
"""Largest error, relative to the size of an element and to what others have, at most 1, by type. Integers and
booleans must be equal."""

UNPADDED = 10
"""How many times larger the error of the unpadded step may be: other shapes add up in another order."""
_LEAST = 1e-2
"""Nothing is measured by less, where other numbers are smaller still."""


class Tamer(Protocol):
    """Makes batches, and knows how to make others if the step fails on them."""

    def __call__(self, shape: BatchShape, generator: torch.Generator) -> Batch:
        """Returns inputs of this shape."""

    def tamer(self, fails: Callable[["Tamer"], bool]) -> "tuple[Tamer, str] | None":
        """Returns what makes inputs that are more like the known ones, and what it no longer draws; None if
        there is no such. `fails`: tells whether the step fails on the inputs of another."""


class Difference(NamedTuple):
    """The element in which two results differ most."""

    name: str
    place: tuple[int, ...]
    got: Any
    wanted: Any
    error: float

    def __str__(self) -> str:
        where = f"[{', '.join(map(str, self.place))}]" if self.place else ""
        return f"{self.name}{where} is {_shown(self.got)} instead of {_shown(self.wanted)}"


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
    """Error of the replay against the eager step without padding; of the worst output."""
    depends_on_batch: str | None
    """The output whose real rows differ without padding, if there is one."""
    passed: bool
    mixes_rows: bool = False
    """Whether rows see padded rows, but not what these really hold, see Note [Rows that see padding]."""
    differences: tuple[str, ...] = ()
    """What differs where, and by how much."""


@dataclass(frozen=True)
class Verification:
    """The outcome of `verify`."""

    checks: tuple[Check, ...]
    notes: tuple[str, ...] = field(default=())
    """What could not be tried, and why."""

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
            of_poison = 0.0 if check.mixes_rows else check.poison_error
            errors[name] = max(errors.get(name, 0.0), check.error, of_poison)
        return errors

    def table(self) -> "Table":
        """The outcome as a `rich` table."""
        from rich.table import Table

        table = Table(title="replay against eager", title_justify="left", caption="\n".join(self.notes))
        for heading in ("mode", "graph", "batch", "error", "poisoned", "unpadded", ""):
            is_text = heading in ("mode", "graph", "batch", "")
            table.add_column(heading, justify="left" if is_text else "right")
        for check in self.checks:
            errors = (check.error, check.poison_error, check.unpadded_error)
            verdict = ("ok, rows mix" if check.mixes_rows else "ok") if check.passed else "FAILED"
            table.add_row(check.mode, check.descriptor, check.batch, *(f"{e:.1e}" for e in errors), verdict)
        return table


def verify(
    runner: Verifiable,
    *,
    make_batch: MakeBatch | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> Verification:
    """Check every captured graph with a full batch and with a batch that is mostly padding, or, where smaller
    graphs serve those, with as much padding as calls get.

    `make_batch`: makes inputs for a shape (default: normally distributed numbers, and integers from each
    field's `sample` range). `tolerance`: replaces the tolerances by type. Raises VerifyError if a check
    fails, or if there is nothing to check. State that the step changes is restored.
    """
    if not runner.graphs:
        raise VerifyError(
            "nothing was checked, because there are no graphs: capture some, or see in report().failures why "
            "none could be captured"
        )
    generator = torch.Generator().manual_seed(seed)
    blank = [field.name for field in runner.buffers.fields if not _can_be_drawn(field)]
    make = make_batch or (lambda shape, generator: random_batch(runner.buffers.fields, shape, generator))
    checking = _Checking(runner, make, generator, tolerance, compares=make_batch is not None or not blank)
    sinks = {name: sink.clone() for name, sink in runner.sinks.items()}
    with turn, step_mode(GraphMode.NONE), torch.inference_mode(False), torch.no_grad():
        try:
            checks = [
                checking.check(graph, shape)
                for graph in runner.graphs.values()
                for shape in shapes_to_try(graph.descriptor, _of_mode(graph, runner.graphs))
            ]
        finally:
            for name, sink in runner.sinks.items():
                sink.copy_(sinks[name])
    outcome = Verification(tuple(checks), tuple(dict.fromkeys(checking.notes)))
    if not outcome.passed:
        raise VerifyError(_complaint(outcome))
    return outcome


def random_batch(fields: tuple[Field, ...], shape: BatchShape, generator: torch.Generator) -> Batch:
    """Random values for every field, on the host."""
    return {field.name: _random_values(field, shape, generator) for field in fields}


def _of_mode(graph: CapturedGraph, graphs: Iterable[GraphKey]) -> list[BatchDescriptor]:
    """The descriptors of graphs of the same mode."""
    return [key.descriptor for key in graphs if key.mode is graph.key.mode]


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


class _Checking:
    """The checks of one `verify`."""

    def __init__(
        self,
        runner: Verifiable,
        make: MakeBatch,
        generator: torch.Generator,
        tolerance: float | None,
        *,
        compares: bool,
    ) -> None:
        """`compares`: whether inputs are such that rows can be compared with those without padding."""
        self._runner, self._make, self._generator, self._tolerance = runner, make, generator, tolerance
        self._compares = compares
        self.notes: list[str] = []
        self._of_padding = HitPlaces(())
        """What padded rows may write, as the last comparison of state found."""

    def check(self, graph: CapturedGraph, shape: BatchShape) -> Check:
        runner, names = self._runner, self._runner.outputs.names
        trials, batch, expected, kept = self._eagerly(graph, shape)
        plain, left = self._replayed(graph, batch, shape, trials)
        found = _differences(names, plain, expected, self._tolerance)
        found += self._of_state(graph, batch, shape, trials, left, kept)
        error = max((each.error for each in found), default=0.0)
        wrong = [each for each in found if each.error > self._allowed(each.wanted)]
        said = [f"{each}, which the eager step gives" for each in wrong]

        poison_error, is_poisoned = self._poison(graph, batch, shape, trials, plain)
        # Real rows full of padding collide with it, and a step that is told its descriptor may well do
        # something else for another one.
        is_padded = self._compares and shape != shapes_to_try(graph.descriptor)[0]
        unpadded_error, dependent, is_compared = 0.0, None, False
        if not wrong and is_padded and not runner.arguments({}, graph.descriptor):
            tried = self._against_unpadded(graph, batch, shape)
            is_compared = tried is not None
            unpadded_error, dependent = tried or (0.0, None)
        is_full = shape == shapes_to_try(graph.descriptor)[0]
        mixes = is_poisoned is not None and not is_full
        if mixes and is_compared and dependent is None and not runner.rows_are_independent:
            dependent = self._among_telling(graph, batch, shape)
        is_cleared = is_poisoned is None or (
            is_compared and dependent is None and not runner.rows_are_independent
        )
        if is_poisoned is not None and not is_cleared:
            said.append(f"{is_poisoned} under poison")
        return Check(
            str(graph.key.mode),
            str(graph.descriptor),
            str(shape),
            error,
            poison_error,
            unpadded_error,
            dependent,
            passed=not wrong and is_cleared and dependent is None,
            mixes_rows=is_poisoned is not None and is_cleared,
            differences=tuple(said),
        )

    def _allowed(self, wanted: Any) -> float:
        if not isinstance(wanted, torch.Tensor):
            return 0.0
        return TOLERANCES.get(wanted.dtype, 0.0) if self._tolerance is None else self._tolerance

    # -- runs --------------------------------------------------------------------------------------

    def _eagerly(
        self, graph: CapturedGraph, shape: BatchShape
    ) -> tuple[Trials, Batch, list[Any], list[torch.Tensor]]:
        """A batch, and what the eager step makes of it: its results, and what it leaves where it writes."""
        while True:
            trials, batch = self._runner.trials(), self._make(shape, self._generator)
            try:
                expected, kept = self._watched(graph, batch, shape, trials)
            except VerifyError:
                raise
            except Exception as error:
                self._make_tamer(graph, shape, error)
            else:
                return trials, batch, expected, kept

    def _watched(
        self, graph: CapturedGraph, batch: Batch, shape: BatchShape, trials: Trials
    ) -> tuple[list[Any], list[torch.Tensor]]:
        self._runner.buffers.fill(batch, shape, graph.descriptor)
        with trials.undone():
            rows = trials.run_for_good(lambda: eager_rows(self._runner, graph, shape))
            return rows, [region.read() for region in trials.regions]

    def _make_tamer(self, graph: CapturedGraph, shape: BatchShape, error: Exception) -> None:
        def fails(make: Tamer) -> bool:
            batch = make(shape, torch.Generator().manual_seed(0))
            try:
                self._watched(graph, batch, shape, self._runner.trials())
            except Exception:
                return True
            return False

        find = getattr(self._make, "tamer", None)
        found = find(fails) if find is not None else None
        told = f"{type(error).__name__}: {error}"
        if found is None:
            drawn = [f for f in self._runner.buffers.fields if f.sample is not None]
            ranges = "".join(f", {f.name} from {f.sample[0]} to {f.sample[1] - 1}" for f in drawn if f.sample)
            raise VerifyError(
                f"nothing can be compared at {graph.descriptor} with {shape}, because the step fails on the "
                f"inputs that were made{ranges} ({told}): pass make_batch= to the runner or to verify(), or "
                f"another `sample` to the fields"
            ) from error
        self._make, spared = found
        self.notes.append(f"{spared}, because the step fails on others ({told})")

    def _replayed(
        self, graph: CapturedGraph, batch: Batch, shape: BatchShape, trials: Trials, *, poison: bool = False
    ) -> tuple[list[Any], list[torch.Tensor]]:
        runner, regions = self._runner, trials.regions
        with trials.undone():
            runner.buffers.fill(batch, shape, graph.descriptor, poison=poison)
            if poison:
                runner.poison_surroundings()
            runner.launch(graph)
            return real_rows(runner, graph.leaves, shape), [region.read() for region in regions]

    # -- comparisons -------------------------------------------------------------------------------

    def _of_state(
        self,
        graph: CapturedGraph,
        batch: Batch,
        shape: BatchShape,
        trials: Trials,
        left: list[torch.Tensor],
        kept: list[torch.Tensor],
    ) -> list[Difference]:
        """Where the replay leaves something else than the eager step."""
        regions = trials.regions
        if _same_state(regions, left, kept):
            return []
        # What a second run leaves otherwise (a time, an address) says nothing of the graph.
        _, again = self._watched(graph, batch, shape, trials)
        left = [
            torch.where(_unlike(one, other), one, got)
            for one, other, got in zip(kept, again, left, strict=True)
        ]
        if _same_state(regions, left, kept):
            return []
        names = [f"what the step leaves in {_described(region.tensor)}" for region in regions]
        return _differences(names, left, kept, self._tolerance)

    def _poison(
        self, graph: CapturedGraph, batch: Batch, shape: BatchShape, seen: Trials, plain: list[Any]
    ) -> tuple[float, Difference | None]:
        """How far results change under poison, and where too far."""
        runner = self._runner
        if seen.casts_to_integers and not runner.rows_are_independent:
            self.notes.append(
                "no poison was tried, because the step makes integers of numbers, maybe indices"
            )
            return 0.0, None
        trials = runner.trials()
        # Poisoned padding may write elsewhere than plain padding: observe that, too, before the replay does.
        runner.buffers.fill(batch, shape, graph.descriptor, poison=True)
        trials.run(lambda: eager_rows(runner, graph, shape))
        poisoned, _ = self._replayed(graph, batch, shape, trials, poison=True)
        found = _differences(runner.outputs.names, poisoned, plain, self._tolerance)
        wrong = [each for each in found if each.error > self._allowed(each.wanted)]
        return max((each.error for each in found), default=0.0), wrong[0] if wrong else None

    def _against_unpadded(
        self,
        graph: CapturedGraph,
        batch: Batch,
        shape: BatchShape,
        flips: float = 0.0,
        *,
        grossly: bool = False,
    ) -> tuple[float, str | None] | None:
        """The error of real rows against those without padding, and what differs by more than rounding; None
        if the step does not work without padding."""
        runner, trials = self._runner, self._runner.trials()

        def allowed(dtype: torch.dtype) -> float:
            coarse = gross(dtype, runner.buffers.device, trials)
            if not (dtype.is_floating_point or dtype.is_complex):
                return 1.0 if trials.rounds_to_few_bits else flips
            fine = UNPADDED * max(TOLERANCES.get(dtype, 0.0), self._tolerance or 0.0)
            is_coarse = (
                grossly or trials.rounds_to_few_bits or coarse > gross(dtype, torch.device("cpu"), _EXACT)
            )
            return max(fine, coarse) if is_coarse else fine

        inputs, with_state = (
            unpadded_inputs(runner, batch, shape),
            not (grossly or runner.rows_are_independent),
        )
        try:
            with trials.undone():
                wanted = trials.run_for_good(lambda: on_copies(runner, inputs, shape), counting=with_state)
                alone = HitPlaces.of(trials.regions, inputs, runner.buffers.fields)
                regions = [region for region in trials.regions if argument_of(region, inputs) is None]
                kept = [region.read() for region in regions]
        except Exception:
            return None
        names = runner.outputs.names
        if trials.draws_random:
            return self._with_fixed_draws(graph, batch, shape, inputs, trials, allowed)
        of_padding = HitPlaces(())
        if with_state:
            try:
                of_padding = refuse_writes_of_padding(runner, graph, batch, shape, trials, alone)
            except CaptureError as error:
                return float("inf"), str(error)
        self._watched(graph, batch, shape, trials)
        with trials.undone():
            runner.buffers.fill(batch, shape, graph.descriptor)
            runner.launch(graph)
            got, left = real_rows(runner, graph.leaves, shape), [region.read() for region in regions]
        if with_state:
            self._of_padding = of_padding
        got = without_writes_of_padding(runner, graph, self._of_padding, got, wanted)
        off, dependent = dependence(names, got, wanted, allowed)
        if dependent is None and with_state:
            dependent = dependent_state(regions, left, kept, of_padding, allowed)
        return off, dependent

    def _with_fixed_draws(
        self,
        graph: CapturedGraph,
        batch: Batch,
        shape: BatchShape,
        inputs: dict[str, torch.Tensor],
        trials: Trials,
        allowed: Callable[[torch.dtype], float],
    ) -> tuple[float, str | None] | None:
        """Other sizes draw other numbers: the eager step with padding and without, with constants drawn."""
        try:
            with FixedDraws():
                self._runner.buffers.fill(batch, shape, graph.descriptor)
                padded = trials.run(lambda: eager_rows(self._runner, graph, shape))
                alone = trials.run(lambda: on_copies(self._runner, inputs, shape))
        except DrawsAreMixed:
            return None
        return dependence(self._runner.outputs.names, padded, alone, allowed)

    def _among_telling(self, graph: CapturedGraph, batch: Batch, shape: BatchShape) -> str | None:
        """The output that differs without padding in a batch beside which padding stands out."""
        for other, flips in telling(batch, self._runner.buffers.fields, shape):
            tried = self._against_unpadded(graph, other, shape, flips, grossly=True)
            if tried is not None and tried[1] is not None:
                return tried[1]
        return None


class _Exact:
    """A computation without convolutions, which TF32 may shorten, in its own type."""

    work: Sequence[tuple[Any, str]] = ()
    rounds_to_few_bits = False


_EXACT = _Exact()


def dependent_state(
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
            return f"what the step leaves in {_described(region.tensor)}"
    return None


def _same_state(
    regions: Sequence[WrittenRegion], got: list[torch.Tensor], wanted: list[torch.Tensor]
) -> bool:
    """Returns whether two runs of one shape leave the same, but for rounding."""
    pairs = zip(regions, got, wanted, strict=True)
    return all(difference(a, b, r.before) <= UNPADDED * TOLERANCES.get(b.dtype, 0.0) for r, a, b in pairs)


def _described(tensor: torch.Tensor) -> str:
    return f"a tensor {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _differences(
    names: list[str], got: list[Any], expected: list[Any], tolerance: float | None
) -> list[Difference]:
    """Where each output differs most, the one with the largest error first."""
    if len(got) != len(expected):
        return [Difference("the number of outputs", (), len(got), len(expected), float("inf"))]
    found = []
    for name, a, b in zip(names, got, expected, strict=True):
        if not isinstance(a, torch.Tensor):
            if not same_constant(a, b):
                found.append(Difference(name, (), a, b, float("inf")))
        elif not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
            found.append(Difference(name, (), _kind(a), _kind(b), float("inf")))
        elif (worst := _worst(name, a, b)) is not None:
            found.append(worst)
    return sorted(found, key=lambda each: -each.error)


def _worst(name: str, a: torch.Tensor, b: torch.Tensor) -> Difference | None:
    unlike = _unlike(a, b)
    if not bool(unlike.any()):
        return None
    wide = torch.complex128 if a.is_complex() else torch.float64
    one, other = a.to(wide), b.to(wide)
    sizes = other.abs()
    usual = sizes[sizes.isfinite() & (sizes > 0)]
    typical = float(usual.median()) if usual.numel() else 0.0
    errors = (one - other).abs() / (sizes + min(1.0, max(typical, _LEAST)))
    errors = torch.where(unlike, torch.nan_to_num(errors, nan=float("inf"), posinf=float("inf")), 0.0)
    at = int(errors.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at, device="cpu"), a.shape))
    return Difference(name, index, a.reshape(-1)[at], b.reshape(-1)[at], float(errors.reshape(-1)[at]))


def _unlike(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where two tensors differ; NaNs are equal."""
    return (a != b) & ~((a != a) & (b != b))


def _kind(value: Any) -> str:
    return _described(value) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _shown(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    number = value.item()
    return f"{number:.6g}" if isinstance(number, float) else str(number)


def _complaint(outcome: Verification) -> str:
    failed = [check for check in outcome.checks if not check.passed]
    lines = []
    for check in failed:
        lines.append(
            f"{check.mode} {check.descriptor} with {check.batch}: error {check.error:.3g}, "
            f"under poison {check.poison_error:.3g}, without padding {check.unpadded_error:.3g}"
            + (f": {check.depends_on_batch} depends on the batch" if check.depends_on_batch else "")
        )
        lines += [f"  {each}" for each in check.differences]
    hint = ""
    if any("under poison" in each for check in failed for each in check.differences):
        hint = "\nAn error under poison means that real rows depend on padded rows: the step mixes rows."
    told = [f"{len(failed)} of {len(outcome.checks)} checks failed:", *lines, *outcome.notes]
    return "\n  ".join(told) + hint
