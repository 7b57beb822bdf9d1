"""Registers programs, and runs one of them twice: from graphs and eagerly, on equal objects.

A program is a function of a `World`, from which it takes its inputs and in which it wraps what it calls:

    @program("mlp", tags=["text"])
    def mlp(world):
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU()).to(world.device)
        f = world.graphed(model, ladder=[1, 2, 4])
        for rows in (3, 1, 4):
            yield f(world.randn(rows, 8))
        world.diagnose(f, world.randn(2, 8))

What it yields, or gives to `world.keep`, is compared twice: as it was at that moment, and as it is at the
end, as people keep results in lists. Inputs drawn from the world, wrapped modules and what it gives to
`world.watch` are compared at the end.
"""

import dataclasses
import importlib
import inspect
import logging
import pkgutil
import random
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from corpus.snapshots import difference, snapshot
from ostinato import graphed
from ostinato.graphs import OstinatoError, graphed_train_step

OUTCOMES = ("right", "right-partly-eager", "refused", "raised-by-name", "wrong", "crashed")
EXPECTED = {"first-call", "larger-than-max", "empty-batch"}
"""Reasons to run eagerly that are no loss: the call has no graph by the choice of sizes."""

PROGRAMS: dict[str, "Program"] = {}


@dataclasses.dataclass(frozen=True)
class Program:
    """A registered program."""

    name: str
    tags: tuple[str, ...]
    body: Callable[["World"], Any]


def program(name: str, tags: Iterable[str] = ()) -> Callable[[Callable], Callable]:
    """Registers the decorated function of a `World` under `name`."""

    def register(body: Callable) -> Callable:
        assert name not in PROGRAMS, f"two programs are called {name!r}"
        PROGRAMS[name] = Program(name, tuple(tags), body)
        return body

    return register


def all_programs() -> dict[str, Program]:
    """Imports all files of programs, and returns what they registered."""
    import corpus

    for module in pkgutil.iter_modules(corpus.__path__):
        if module.name.startswith(("inference_", "training_")):
            importlib.import_module(f"corpus.{module.name}")
    return PROGRAMS


class World:
    """What a program sees: inputs, the wrapper or none, and a list of what it shows."""

    def __init__(self, device: str, graphs: bool) -> None:
        self.device = torch.device(device)
        self.graphs = graphs
        """True in the run with graphs. Ordinary programs need not know."""
        self.shown: list[Any] = []
        """What was kept, as the program holds it."""
        self.shown_then: list[Any] = []
        """The same, copied when it was kept."""
        self.drawn: list[torch.Tensor] = []
        self.watched: list[Any] = []
        self.wrappers: list[Any] = []
        self.diagnoses: list[tuple[Any, tuple, dict]] = []
        self._numbers = torch.Generator().manual_seed(1234)

    # What programs call.

    def graphed(self, function: Any, *, watch: bool = True, **options: Any) -> Any:
        """Wraps `function` with `ostinato.graphs.graphed`; returns it as it is in the eager run.

        The state of a module is compared at the end, unless `watch` is false: padded rows may write to what
        the program has set aside for them.
        """
        if watch and isinstance(function, nn.Module):
            self.watched.append(function)
        return self.wrapped(graphed, function, **options)

    def graphed_train_step(self, function: Any, *args: Any, **options: Any) -> Any:
        """Wraps `function` with `ostinato.graphs.graphed_train_step`; as it is in the eager run."""
        return self.wrapped(graphed_train_step, function, *args, **options)

    def wrapped(self, wrap: Callable, function: Any, *args: Any, **options: Any) -> Any:
        """Returns `wrap(function, ...)` in the run with graphs, `function` in the eager one."""
        if not self.graphs:
            return function
        wrapper = wrap(function, *args, **options)
        self.report_of(wrapper)
        return wrapper

    def report_of(self, wrapper: Any) -> None:
        """Counts the calls of `wrapper`, made elsewhere (a copy, say), in the run with graphs."""
        if self.graphs and not any(wrapper is one for one in self.wrappers):
            self.wrappers.append(wrapper)

    def keep(self, shown: Any) -> Any:
        """Shows something that both runs must have; returns it."""
        self.shown.append(shown)
        self.shown_then.append(snapshot(shown))
        return shown

    def watch(self, *objects: Any) -> None:
        """Has the state of `objects` compared at the end."""
        self.watched.extend(objects)

    def attempt(self, call: Callable[[], Any]) -> Any:
        """Keeps what `call` returns, or the exception that it raises."""
        try:
            return self.keep(call())
        except Exception as error:
            if isinstance(error, OstinatoError):
                raise
            self.keep(f"{type(error).__name__}: {error}")
            return None

    def diagnose(self, wrapper: Any, *args: Any, **kwargs: Any) -> None:
        """Has `wrapper.verify()` and `wrapper.doctor(*args, **kwargs)` called at the very end."""
        if self.graphs:
            self.diagnoses.append((wrapper, args, kwargs))

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Draws an input from the normal distribution."""
        return self.input(torch.randn(*shape, generator=self._numbers, dtype=torch.float32).to(dtype))

    def rand(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Draws an input between 0 and 1."""
        return self.input(torch.rand(*shape, generator=self._numbers, dtype=torch.float32).to(dtype))

    def randint(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Draws integers below `high`."""
        return self.input(torch.randint(high, shape, generator=self._numbers, dtype=dtype))

    def input(self, tensor: torch.Tensor) -> torch.Tensor:
        """Puts a tensor onto the device, and has it compared at the end."""
        tensor = tensor.to(self.device)
        self.drawn.append(tensor)
        return tensor

    # What the runner calls.

    def run(self, body: Callable) -> BaseException | None:
        """Runs a program; returns what it raised."""
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        rng = torch.get_rng_state()
        try:
            shown = body(self)
            if inspect.isgenerator(shown):
                for one in shown:
                    self.keep(one)
        except Exception as error:
            return error
        finally:
            torch.set_rng_state(rng)
        return None

    def at_the_end(self) -> dict[str, Any]:
        """Returns copies of all that is compared once the program has run."""
        return {
            "inputs": snapshot(self.drawn),
            "objects": snapshot(self.watched),
            "results held until the end": snapshot(self.shown),
        }


@dataclasses.dataclass
class Result:
    """How a program went."""

    name: str
    tags: tuple[str, ...]
    outcome: str = "right"
    differences: list[str] = dataclasses.field(default_factory=list)
    overwritten_only: bool = False
    """All results were right when they came; only later some earlier one was no longer."""
    error: str = ""
    reasons: list[str] = dataclasses.field(default_factory=list)
    graph_calls: int = 0
    eager_calls: int = 0
    eager_steps: dict[str, int] = dataclasses.field(default_factory=dict)
    alarms: list[str] = dataclasses.field(default_factory=list)
    """Complaints of `verify` and `doctor` about a program that is right, and traces that they leave."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """What they say about other programs."""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return {k: v for k, v in dataclasses.asdict(self).items() if v not in ("", [], {}, False)}


class _Words(logging.Handler):
    """Collects what the runtime warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def _listening() -> Any:
    words, logger = _Words(), logging.getLogger("ostinato")
    logger.addHandler(words)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield words
            words.said += [str(one.message) for one in warned if "ostinato" in str(one.filename)]
    finally:
        logger.removeHandler(words)


def run_program(chosen: Program, device: str = "cpu", diagnose: bool = True) -> Result:
    """Runs a program eagerly and from graphs, and says how they compare."""
    begun, result = time.perf_counter(), Result(chosen.name, chosen.tags)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager = World(device, graphs=False)
        wanted = eager.run(chosen.body)
        expected = eager.at_the_end()
    ours = World(device, graphs=True)
    with _listening() as words:
        raised = ours.run(chosen.body)
    result.reasons = list(dict.fromkeys(words.said))
    _judge(result, ours, eager, raised, wanted, expected)
    _count(result, ours)
    if diagnose and raised is None:
        _diagnose(result, ours)
    result.seconds = round(time.perf_counter() - begun, 3)
    return result


def _judge(
    result: Result,
    ours: World,
    eager: World,
    raised: BaseException | None,
    wanted: BaseException | None,
    expected: dict[str, Any],
) -> None:
    """Fills in what differs, and the outcome if it is a bad one."""
    if wanted is not None and raised is not None and type(raised) is type(wanted):
        result.outcome = "crashed"
        result.error = f"the program fails without graphs, too: {type(wanted).__name__}: {wanted}"
        return
    if raised is not None:
        named = isinstance(raised, OstinatoError)
        result.outcome = "raised-by-name" if named else "crashed"
        result.error = f"{type(raised).__name__}: {raised}"
        if not named:
            result.error += "\n" + "".join(traceback.format_tb(raised.__traceback__)[-6:])
    if wanted is not None and raised is None:
        result.differences.append(f"raises nothing instead of {wanted!r}")
    for place, (one, other) in enumerate(zip(ours.shown_then, eager.shown_then, strict=False)):
        _note(result, difference(one, other, f"result {place}"))
    if result.outcome == "right":
        if len(ours.shown) != len(eager.shown):
            result.differences.append(f"{len(ours.shown)} results instead of {len(eager.shown)}")
        right_then = not result.differences
        found = ours.at_the_end()
        for what in ("inputs", "objects"):
            _note(result, difference(found[what], expected[what], what))
        if right_then:
            held = "results held until the end"
            result.overwritten_only = not result.differences
            _note(result, difference(found[held], expected[held], held))
            result.overwritten_only = result.overwritten_only and bool(result.differences)
    if result.differences:
        result.outcome = "wrong"


def _note(result: Result, found: str | None) -> None:
    if found is not None:
        result.differences.append(found)


def _count(result: Result, world: World) -> None:
    for wrapper in world.wrappers:
        with suppress(NotImplementedError):
            report = getattr(wrapper, "graph_call", wrapper).report()
            result.graph_calls += report.replays
            for reason, calls in report.eager_steps.items():
                name = str(getattr(reason, "value", reason))
                result.eager_steps[name] = result.eager_steps.get(name, 0) + calls
            result.reasons += [str(f) for f in report.failures.values() if not _told(str(f), result.reasons)]
    result.reasons = list(dict.fromkeys(result.reasons))
    result.eager_calls = sum(result.eager_steps.values())
    if result.outcome == "right" and set(result.eager_steps) - EXPECTED:
        result.outcome = "right-partly-eager" if result.graph_calls else "refused"


def _told(text: str, said: Sequence[str]) -> bool:
    return any(text in one for one in said)


def _diagnose(result: Result, world: World) -> None:
    """Has the graphs verified and diagnosed; neither may leave a trace."""

    def state() -> Any:
        random_state = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1]]
        if world.device.type == "cuda":
            random_state.append(torch.cuda.get_rng_state(world.device))
        return snapshot((world.drawn, world.watched, random_state))

    healthy = result.outcome in ("right", "right-partly-eager")
    for wrapper, args, kwargs in world.diagnoses:
        controls = getattr(wrapper, "graph_call", wrapper)
        before, said = state(), []
        try:
            if result.graph_calls:
                controls.verify()
        except OstinatoError as error:
            said.append(f"verify: {error}")
        except Exception as error:
            result.alarms.append(f"verify raises {type(error).__name__}: {error}")
        if (found := difference(state(), before, "state")) is not None:
            result.alarms.append(f"verify changes {found}")
        before = state()
        try:
            diagnosis = controls.doctor(*args, **kwargs)
            if not diagnosis.is_healthy:
                said.append(f"doctor: {diagnosis}")
            elif result.outcome == "refused":
                result.notes.append("doctor finds nothing, although calls run eagerly")
        except Exception as error:
            result.alarms.append(f"doctor raises {type(error).__name__}: {error}")
        if (found := difference(state(), before, "state")) is not None:
            result.alarms.append(f"doctor changes {found}")
        if result.outcome == "right":
            result.alarms += said
        else:
            result.notes += said
    if not healthy:
        result.notes += result.alarms
        result.alarms = []
