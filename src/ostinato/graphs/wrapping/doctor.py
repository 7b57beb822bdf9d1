"""Says why a function cannot be served from graphs: every cause, with its line, from one call."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from ..backends import backend_for
from ..blame import blamed, frames_of
from ..capturing import python_draws
from ..capturing.autocast import clean_autocast_cache
from ..capturing.captured import CapturedGraph
from ..capturing.gate import turn
from ..capturing.trial import Trials
from ..checking.host_reads import HostReads
from ..checking.obstacles import Obstacle, ObstacleWatch, counted
from ..checking.verify import Verification
from ..dispatching.mode import GraphMode
from ..dispatching.step_mode import step_mode
from ..errors import CaptureError, VerifyError
from ..forbidden import Forbidden
from ..inputs.buffers import Batch
from ..report import Report, without_numbers
from .entry import Settings
from .reached import Reached
from .signature import Signature


class Examined(Protocol):
    """What a diagnosis needs from the calls of a function."""

    function: Callable[..., Any]
    settings: Settings

    def signature_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Signature, Batch]: ...

    def device_of(self, batch: Batch) -> torch.device: ...

    def capture(self, *args: Any, **kwargs: Any) -> Report: ...

    def graphs(self) -> list[CapturedGraph]: ...

    def verify(self) -> Verification: ...

    def report(self) -> Report: ...

    def measured(self) -> list[str]: ...


_ON_A_GPU = (
    "on a GPU: {}\n    {} without device= makes a tensor in host memory, where the step cannot use it, and a "
    "copy to the device cannot be captured: pass device=x.device"
)
_LEFT_ALONE = (
    "{}\n    {}: the time goes into {} alone, which replays leave as it is: take it around the calls to have "
    "that of every call"
)
_RAISED = "raised while a capture was under way, and is not raised otherwise"
_WAY_OUT = (
    "What has to stay as it is can run between graphs: mark its function @eager_boundary and use "
    'graphed(..., mode="piecewise").'
)


@dataclass(frozen=True)
class Diagnosis:
    """What stands between a function and its graphs; `print` it."""

    obstacles: tuple[Obstacle, ...]
    """Lines that a capture forbids, in the order in which they run."""
    operations: int
    """ATen calls of one run."""
    causes: tuple[str, ...]
    """Why graphs were refused for other reasons: rows that depend on the batch, state in Python, ..."""
    report: Report | None
    """What a capture gave; None if the arguments rule one out."""
    verification: Verification | None
    """How graphs compare with the function; None if there are none, or `causes` says how they differ."""
    notes: tuple[str, ...] = ()
    """What is no obstacle here and would be one on a GPU, and numbers in Python that replays leave alone."""

    @property
    def is_healthy(self) -> bool:
        """Whether every capture size was captured and verified, and no replay would repeat what the step
        read in Python."""
        has_all = self.report is not None and not self.report.failures
        is_constant = all(obstacle.is_refused for obstacle in self.obstacles)
        passed = self.verification is not None and self.verification.passed
        return has_all and not self.causes and is_constant and passed

    def __str__(self) -> str:
        lines = [self._summary(), *map(str, self.obstacles), *self.causes]
        if any(obstacle.is_refused for obstacle in self.obstacles) and not self.is_healthy:
            lines.append(_WAY_OUT)
        lines += self.notes
        return "\n".join(lines)

    def _summary(self) -> str:
        graphs = counted(0 if self.report is None else len(self.report.graphs), "graph")
        operations = counted(self.operations, "operation")
        if self.is_healthy:
            return f"healthy: {graphs} captured and verified, {operations} per run"
        found = counted(len(self.obstacles) + len(self.causes), "obstacle")
        return f"{found} in {operations}, {graphs} captured"


def diagnose(call: Examined, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Diagnosis:
    """Examine what a wrapper of its own would do with a call, capture for it, and verify.

    What the function raises for these arguments is raised. `call` keeps graphs; the function and all that it
    changes are as before.
    """
    signature, batch = call.signature_of(args, kwargs)
    if signature.opaque is not None:
        return Diagnosis((), 0, (f"{signature.opaque}: pass tensors or numbers",), None, None)
    piecewise = call.settings.mode is GraphMode.PIECEWISE
    with turn, _quiet(), python_draws.undone():
        watch, times = _examine(call, signature, batch, ObstacleWatch(piecewise=piecewise))
        verification, causes = None, []
        try:
            call.capture(*args, **kwargs)
            if call.graphs():
                verification = call.verify()
        except (CaptureError, VerifyError) as error:
            causes.append(str(error))
        report = call.report()
    of_sizes = {without_numbers(cause): cause for cause in report.failures.values()}
    causes += [cause for cause in of_sizes.values() if not _is_said(cause, watch.obstacles)]
    is_on_host = call.device_of(batch).type == "cpu"
    notes = [_ON_A_GPU.format(where, what) for where, what in watch.made_on_host.items() if is_on_host]
    left_alone = {name.rpartition(".")[2] for name in call.measured()}
    obstacles = []
    for each in watch.obstacles:
        names = times.get(each.where or "", frozenset())
        if names and names <= left_alone and not each.is_refused:
            notes.append(_LEFT_ALONE.format(each.where, each.what, ", ".join(sorted(names))))
        else:
            obstacles.append(each)
    return Diagnosis(
        tuple(obstacles), watch.operations, tuple(causes), report, verification, notes=tuple(notes)
    )


def _is_said(cause: str, obstacles: tuple[Obstacle, ...]) -> bool:
    """Returns whether a line that is on the list is the cause."""
    draws = python_draws.WHY_NOT in cause
    return any(
        (obstacle.where and f"(at {obstacle.where}" in cause) or (draws and "random" in obstacle.what)
        for obstacle in obstacles
    )


def _examine(
    call: Examined, signature: Signature, batch: Batch, watch: ObstacleWatch
) -> tuple[ObstacleWatch, dict[str, frozenset[str]]]:
    """Run the function on copies of its inputs, once as it is and once watched, and undo both runs. Returns
    what the watch has found, and where the times go that it reads, by line."""
    reads = HostReads(partial(watch.note, is_refused=False))
    backend = backend_for(call.device_of(batch))

    def run(watching: AbstractContextManager[Any]) -> None:
        trials = Trials(backend, generators=call.settings.options.generators)
        before = Reached(call.function, *signature.functions)
        copies = {name: tensor.detach().clone() for name, tensor in batch.items()}

        def step() -> Any:
            with watching:
                return signature.call(call.function, copies)

        try:
            with step_mode(GraphMode.NONE), torch.no_grad(), clean_autocast_cache():
                trials.run_for_good(step)
        finally:
            trials.undo()
            before.put_back(before.changed())

    run(nullcontext())  # as before a capture: kernels are compiled, and what it raises anyway is raised
    try:
        run(_watching(watch, reads))
    except Exception as error:
        text = str(error).splitlines()
        what = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        watch.note(Forbidden(what, _RAISED), blamed(frames_of(error.__traceback__)))
    return watch, reads.times


@contextmanager
def _watching(watch: ObstacleWatch, reads: HostReads) -> Iterator[None]:
    with watch, reads:
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """A context in which this thread's captures log no warnings: the diagnosis says it all."""
    thread = threading.get_ident()
    logger = logging.getLogger("ostinato.graphs")

    def is_said(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno > logging.WARNING

    logger.addFilter(is_said)
    try:
        yield
    finally:
        logger.removeFilter(is_said)
