"""The graphs of a training step, a set for every kind of batch, and whether they are still valid."""

import gc
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..capturing import python_draws
from ..capturing.compiled import make_room
from ..capturing.pool import GraphPool
from ..checking.addresses import moved_error
from ..dispatching.descriptor import BatchDescriptor, BatchShape
from ..dispatching.dispatch import Dispatcher, Reason
from ..dispatching.keys import GraphKey
from ..dispatching.ladder import Ladder
from ..dispatching.mode import GraphMode
from ..errors import CaptureError
from ..inputs.buffers import Batch, InputBuffers
from ..journal import WriteJournal
from ..options import CaptureOptions
from ..report import Report
from ..results import Results
from ..runner import CudaGraphRunner
from ..trees import flatten, map_tensors
from ..trimming import Trimmer
from ..wrapping.effects import Effects, Stepped
from ..wrapping.reached import Reached
from . import other_optimizers
from .batches import IGNORED, LENGTH_DIM, BatchKind
from .checkpointing import draws_are_kept
from .gradients import Gradients
from .loss import Loss
from .micro_batch import Kind, MicroBatch
from .optimizers import StaticOptimizer
from .padding import PaddingTrial
from .places import Places, Written
from .python_values import PythonValues
from .update import Update

logger = logging.getLogger("ostinato.graphs")

_BAKED = ("the set of frozen parameters", "the optimizer's groups", "the scaler's numbers")
"""The names of what `_surroundings` returns."""


@dataclass(frozen=True)
class KindGraphs:
    """The graphs for batches of one kind."""

    kind: BatchKind
    runner: CudaGraphRunner
    why_not_padded: str | None
    results: Trimmer

    @property
    def is_padded(self) -> bool:
        """Whether shorter batches are padded to a rung."""
        return self.why_not_padded is None

    def cut(self, result: Any, shape: BatchShape) -> Any:
        """What a padded step returned, or left as well, without padding."""
        leaves, structure = flatten(result)
        if not self.is_padded or len(leaves) == 1:
            return result
        cut = [
            self.results.trim(i, leaf, shape) if isinstance(leaf, torch.Tensor) else leaf
            for i, leaf in enumerate(leaves)
        ]
        return structure.filled(cut)


class GraphsByKind:
    """Captured at every rung of one ladder; dropped and recaptured all together."""

    def __init__(
        self,
        micro_batch: MicroBatch,
        loss: Loss,
        gradients: Gradients,
        update: Update,
        optimizer: StaticOptimizer,
        *,
        places: Places,
        values: PythonValues,
        ladder: Ladder | None,
        pool: GraphPool,
        options: CaptureOptions,
    ) -> None:
        """`ladder`: by default the first batch makes it."""
        self._micro_batch, self._loss = micro_batch, loss
        self._gradients, self._update, self._optimizer = gradients, update, optimizer
        self._places, self._values = places, values
        self._ladder, self._pool, self._options = ladder, pool, options
        self.kinds: list[KindGraphs] = []
        """Of all batches that `add` was called with."""
        self._state: dict[str, torch.Tensor] = {}
        self._written: list[Written] = []
        """What steps write, other than buffers and the optimizer's writes, by kind of batch."""
        self._what_python_carries: str | None = None
        """From step to step, which no replay would do."""
        self._refusal: str | None = None
        """Why no graph can serve, regardless of model and loss function."""
        self._baked: tuple[Any, ...] = ()
        self._told: set[str] = set()
        self.eager_steps: Counter[Reason] = Counter()

    @property
    def is_captured(self) -> bool:
        """Whether graphs were captured, as far as possible, and not dropped since."""
        return self._places.known

    @property
    def rungs(self) -> Ladder:
        """The lengths to capture."""
        assert self._ladder is not None, "without a ladder the first batch makes one"
        return self._ladder

    def match(self, inputs: Any, targets: Any) -> tuple[KindGraphs, Batch, int] | None:
        """The graphs for batches like this one, its tensors and its length; None if its kind is unknown."""
        for graphs in self.kinds:
            matched = graphs.kind.batch_of(inputs, targets)
            if matched is not None:
                return graphs, *matched
        return None

    def add(self, inputs: Any, targets: Any, *, is_accumulating: bool) -> None:
        """Register batches like this one; nothing is captured yet. `is_accumulating`: gradients of
        micro-batches are waiting for an update."""
        with self._values.put_back() as before:
            self.kinds.append(self._new(inputs, targets, is_accumulating, before))
        if not self.is_captured:
            self._values.note()

    def follow(self, *, is_accumulating: bool) -> None:
        """Before anything is captured: start over if earlier findings may no longer hold."""
        if self._values.why_changed(quietly=True) is not None:
            self.begin_anew(is_accumulating=is_accumulating)

    def begin_anew(self, *, is_accumulating: bool) -> None:
        """Drop all graphs. Model and loss function have changed: whether padding counts, what they write and
        what Python carries from step to step is determined again."""
        self.drop(is_accumulating=is_accumulating)
        known, self.kinds = self.kinds, []
        self._written, self._what_python_carries = [], None
        for graphs in known:
            self.add(*graphs.kind.first(), is_accumulating=is_accumulating)

    def _new(self, inputs: Any, targets: Any, is_accumulating: bool, before: Reached) -> KindGraphs:
        state = self._note_state(is_accumulating)
        values, known = self._values, bool(self.kinds)

        def find_effects(run: Callable[[], WriteJournal]) -> Effects:
            if not known:
                values.effects = values.find_effects(before, run)
            return values.effects

        trial = PaddingTrial(
            self._loss, state, self._pool.backend, self._options, before.tensors, find_effects
        )
        if (carries := before.why_closed()) is None:
            kind, refusal = trial.kind_of(inputs, targets)
        else:  # not even a trial, which would take what the steps are to take
            kind = BatchKind(inputs, targets, target_pad=IGNORED, with_length=self._loss.takes_mask)
            refusal = carries
        self._written.append(trial.written)
        batch, length = kind.matched(inputs, targets)
        if carries is None:
            carries = self._values.why_no_graph(lambda: trial.journal_of(kind, batch))
            carries = carries or values.why_not_left(before)
        self._what_python_carries = self._what_python_carries or carries or trial.why_no_graph
        if self._ladder is None:
            self._ladder = Ladder([length])

        def step(descriptor: BatchDescriptor, **tensors: torch.Tensor) -> Any:
            is_rung = descriptor.num_tokens in self.rungs
            self._refuse_what_no_graph_keeps(kind)
            does, effects = Kind(str(descriptor.extra)), self._values.effects
            if not (effects and self._gradients.is_trial):
                with python_draws.refused_in_graphs(), self._without_other_optimizers():
                    return self._micro_batch(kind, tensors, does, is_rung=is_rung)
            with python_draws.refused_in_graphs(), self._without_other_optimizers(), effects.noted() as left:
                result = self._micro_batch(kind, tensors, does, is_rung=is_rung)
            effects.let_go()
            return Stepped(result, map_tensors(torch.Tensor.detach, left))

        runner = CudaGraphRunner(
            step,
            InputBuffers(
                kind.fields,
                max_tokens=self.rungs.limit,
                max_reqs=1,
                device=self._loss.device,
                allocate=self._pool.allocate,
            ),
            (),  # see capture_missing
            dispatcher=Dispatcher(GraphMode.FULL, padding=refusal is None),
            pool=self._pool,
            options=replace(self._options, generators=trial.generators),
            state=self._state,
            dummy=kind.dummy,
            warmups_give_back=True,
            output_dim=LENGTH_DIM,
            results=Results.UNGUARDED,
        )
        runner.eager_steps = self.eager_steps
        return KindGraphs(kind, runner, refusal, trial.results)

    def _refuse_what_no_graph_keeps(self, kind: BatchKind) -> None:
        if not self._gradients.is_trial:
            return
        if kind.opaque is not None:
            raise CaptureError(kind.opaque)
        why_not = self._refusal or self._what_python_carries
        if why_not is not None:
            raise CaptureError(why_not)

    def refuse(self, why: str) -> None:
        """Capture no graphs, for this reason."""
        self._refusal = why

    def _without_other_optimizers(self) -> AbstractContextManager[None]:
        if not self._gradients.is_trial:
            return nullcontext()
        return other_optimizers.refused(lambda: self._gradients.parameters, but=self._optimizer.wrapped)

    def _note_state(self, is_accumulating: bool) -> dict[str, torch.Tensor]:
        """What trial runs change and must restore, because they make no updates."""
        gradients = self._gradients.tensors() if is_accumulating else []
        self._state.clear()
        self._state |= {**self._places.buffers(), **self._update.state()}
        for number, written in enumerate(self._written):
            self._state |= {f"{name} of kind {number}": t for name, t in written.tensors.items()}
        self._state |= {f"gradient {number}": tensor for number, tensor in enumerate(gradients)}
        return self._state

    def capture_missing(self, *, is_accumulating: bool) -> None:
        """Capture what has no graph yet, largest first over all kinds of batches."""
        if self._loss.is_compiled:
            make_room(len(self.rungs) * len(self.kinds))
        with torch.no_grad(), self._gradients.kept():
            self._capture_missing(is_accumulating)
        self._places.note()
        self._optimizer.note()
        self._baked = self._surroundings()
        if any(graphs.runner.graphs for graphs in self.kinds):  # else there is one reason for all
            self._values.name_measured()
            self._tell_of_padding()

    def _tell_of_padding(self) -> None:
        for graphs in self.kinds:
            why = graphs.why_not_padded
            if why is not None and why not in self._told:
                self._told.add(why)
                level = logging.WARNING if len(self.rungs) > 1 else logging.INFO
                logger.log(level, "only lengths on the ladder are served from graphs: %s", why)

    def _capture_missing(self, is_accumulating: bool) -> None:
        self._note_state(is_accumulating)
        self._gradients.is_trial = True
        self._update.hold(True)
        release_unused = self._pool.backend.release_unused
        self._gradients.forget_passing()
        self._values.effects.let_go()
        gc.collect()  # uncollected autograd nodes tie gradients to their step's stream
        release_unused()  # activations of the eager update: graphs have their own pool
        try:
            with draws_are_kept(), self._optimizer.undone_in_python(), self._values.captured():
                if self._values.are_assigned and self._what_python_carries is None:
                    self._note_what_is_written(is_accumulating)
                for graphs in self.kinds:
                    missing = [key for key in self._keys() if key not in graphs.runner.failures]
                    _capture(graphs.runner, missing)
        finally:
            self._update.hold(False)
            self._gradients.is_trial = False
            self._gradients.attach()
            release_unused()

    def _note_what_is_written(self, is_accumulating: bool) -> None:
        """Look again: what the first step created did not exist when it was tried."""
        trial = PaddingTrial(self._loss, self._state, self._pool.backend, self._options)
        self._written += [trial.written_at(graphs.kind, min(self.rungs)) for graphs in self.kinds]
        gc.collect()  # as before a capture
        self._note_state(is_accumulating)

    def _keys(self) -> list[GraphKey]:
        return [
            GraphKey(GraphMode.FULL, BatchDescriptor(length, 1, extra=kind.value))
            for length in self.rungs
            for kind in self._micro_batch.kinds
        ]

    def drop(self, *, is_accumulating: bool) -> None:
        """Drop all graphs; the kinds of batches stay known."""
        for graphs in self.kinds:
            graphs.runner.drop()
        self._gradients.leave_the_pool(is_accumulating=is_accumulating)
        self._places.forget()

    def why_not(self) -> Reason | None:
        """Why a replay would not do what the step does now."""
        if not self._places.known:
            return Reason.NOT_CAPTURED
        if self._refusal is not None:  # every graph fails for this reason
            return None
        if self._surroundings() != self._baked:
            self._tell_of_surroundings()
            return Reason.ATTRIBUTE_CHANGED
        return self._values.why_changed()

    def _tell_of_surroundings(self) -> None:
        looks = zip(_BAKED, self._surroundings(), self._baked, strict=True)
        changed = [what for what, now, then in looks if now != then]
        named = " and ".join(changed)
        if changed and named not in self._told:
            self._told.add(named)
            logger.warning(
                "steps run eagerly while these differ from the capture: %s. Call "
                "step.capture(inputs, targets) to capture again",
                named,
            )

    def _surroundings(self) -> tuple[Any, ...]:
        wanted = [parameter.requires_grad for parameter in self._gradients.parameters]
        return wanted, self._optimizer.members, self._update.numbers()

    def check_addresses(self) -> None:
        """Raises AddressError, naming it, if a parameter, buffer or state of the optimizer has moved."""
        if moved := self.moved():
            raise moved_error(moved, "call step.capture(inputs, targets) to capture again")

    def moved(self) -> list[str]:
        """The parameters, buffers and state of the optimizer that have moved, by name."""
        return [*self._places.moved(), *self._optimizer.moved()]

    def report(self) -> Report:
        """What was captured, what it costs, what it served, and why steps ran eagerly."""
        if not self.kinds:
            return Report.of_nothing(GraphMode.FULL, self.eager_steps)
        return Report.joined([graphs.runner.report() for graphs in self.kinds])


def _capture(runner: CudaGraphRunner, keys: list[GraphKey]) -> None:
    try:
        runner.capture(keys)
    except CaptureError as error:
        if "legacy stream" not in str(error):
            raise
        raise CaptureError(
            "an earlier result of the model (such as a loss) is still held with its autograd graph, which "
            "ties gradients to the default stream: keep only its .detach() or .item(), and delete it"
        ) from error
