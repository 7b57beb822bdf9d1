"""A whole training step, forward, loss, backward, clipping, optimizer and schedule, from graphs."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..capturing.gate import turn
from ..capturing.pool import GraphPool
from ..dispatching.descriptor import BatchDescriptor, BatchShape
from ..dispatching.dispatch import Reason
from ..dispatching.ladder import Ladder
from ..errors import ConfigError
from ..inputs.buffers import Batch
from ..options import CaptureOptions
from ..report import Report
from ..runner import CudaGraphRunner
from ..trees import map_tensors
from ..wrapping.effects import Stepped
from .batches import IGNORED, BatchKind
from .fitting import why_not_in_a_graph
from .gradients import Gradients
from .graphs_by_kind import GraphsByKind, KindGraphs
from .loss import Loss
from .micro_batch import Kind, MicroBatch
from .optimizers import StaticOptimizer
from .places import Places
from .python_values import PythonValues
from .update import Update
from .wrapped import why_not_recorded

logger = logging.getLogger("ostinato.graphs")

Schedule = Callable[[int], float | Sequence[float]]

_STATE = {"optimizer_steps", "micro_batches", "skipped", "gradients", "rng", "device_rng", "generators"}
"""The keys of `state_dict`."""
_HAS_HOOKS = "it has hooks, which a replay would not call"
_MOVES_PARAMETERS = (
    "{} gives parameters new memory when it steps (p.data = ...), and a graph would continue with the old: "
    "change them in place (copy_, add_)"
)


class TrainStep:
    """`step(inputs, targets)` trains on one micro-batch and returns its loss; see `graphed_train_step`."""

    def __init__(
        self,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        ladder: Ladder | None,
        *,
        accumulate: int,
        clip_norm: float | None,
        schedule: Schedule | None,
        scaler: torch.amp.GradScaler | None,
        pool: GraphPool | None,
        options: CaptureOptions,
    ) -> None:
        self._loss, self._schedule, self._options = loss, schedule, options
        self._is_ladder_made_up = ladder is None
        self._told: set[str] = set()
        self._accumulate = accumulate
        self._device = loss.device
        self._pool = pool or GraphPool(self._device)
        places, plain = Places(loss.modules), loss.uncompiled()
        self._values = PythonValues(plain.model, plain.loss_fn)
        self._optimizer = StaticOptimizer(optimizer, self._device)
        named, average = places.names_of(self._optimizer.parameters), accumulate > 1
        others = places.parameters_besides(self._optimizer.parameters)
        _tell_of_untrained([name for name, parameter in others if parameter.requires_grad])
        self._gradients = Gradients(named, others=[p for _, p in others], accumulate=average)
        self._update = Update(
            self._optimizer,
            self._gradients,
            self._device,
            clip_norm=clip_norm,
            scaler=scaler,
            average=average,
        )
        self._micro_batch = MicroBatch(
            loss, self._gradients, self._update, self._optimizer, self._pool.backend, accumulate
        )
        self._graphs = GraphsByKind(
            self._micro_batch,
            loss,
            self._gradients,
            self._update,
            self._optimizer,
            places=places,
            values=self._values,
            ladder=ladder,
            pool=self._pool,
            options=options,
        )
        why_not = why_not_recorded(loss.modules, self._device)
        if why_not is not None:
            self._graphs.refuse(why_not)
        self.optimizer_steps = 0
        """Updates so far, including skipped ones; passed to the schedule."""
        self.micro_batches = 0
        """Micro-batches since the last update."""

    def __call__(self, inputs: Any, targets: Any, *, last: bool = False) -> Any:
        """Train on one micro-batch: every `accumulate`-th call updates the parameters.

        `last`: this call does, even if fewer came since the last update; they are averaged. Returns the loss
        of the micro-batch, as a tensor of its own; if the loss function returns more, all of it in the same
        structure, each tensor detached and of its own.
        """
        self._refuse_ambient_autocast()
        with turn, torch.inference_mode(False):
            self._optimizer.notice_cleared_state()
            updates = last or self.micro_batches + 1 == self._accumulate
            if not self._graphs.kinds:
                self._graphs.add(inputs, targets, is_accumulating=self.micro_batches > 0)
            elif not self._optimizer.has_stepped:
                self._graphs.follow(is_accumulating=self.micro_batches > 0)
            found = self._graphs.match(inputs, targets)
            if updates:
                self._follow_the_optimizer()
            does = self._micro_batch.kinds[-1] if updates else Kind.ACCUMULATE
            self._prepare(updates)
            if found is None:
                result = self._run_unseen(inputs, targets, does)
            else:
                graphs, batch, length = found
                result = self._run(graphs, batch, BatchShape(length, 1, extra=does.value))
            if does is Kind.JUDGE:
                self._update.step()
            self.micro_batches += 1
            if updates:
                self._has_updated()
            return result

    def flush(self) -> bool:
        """Update with the micro-batches since the last update, if any. False if there were none."""
        if not self.micro_batches:
            return False
        with turn, torch.inference_mode(False):
            self._gradients.attach()
            self._set_rates()
            self._update.divide_by(self.micro_batches, self._accumulate)
            with torch.no_grad():
                self._update()
            self._graphs.eager_steps[Reason.NOT_CAPTURED] += 1
            self._has_updated()
        return True

    def capture(self, inputs: Any, targets: Any) -> Report:
        """Capture for batches like this one, for example with another number of rows than the first. Before
        the first update, capturing is deferred until after it, because the optimizer has no state yet. Graphs
        with outdated baked-in values (a dropout rate, a weight decay) are captured again."""
        with turn, torch.inference_mode(False):
            is_accumulating = self.micro_batches > 0
            if self._optimizer.has_stepped and self._graphs.is_captured:
                is_other = self._graphs.why_not() or self._optimizer.moved_numbers() or self._graphs.moved()
                if self._optimizer.step_inside() or is_other:
                    self._graphs.begin_anew(is_accumulating=is_accumulating)
            if self._graphs.match(inputs, targets) is None:
                self._graphs.add(inputs, targets, is_accumulating=is_accumulating)
            if self._optimizer.has_stepped:
                self._graphs.capture_missing(is_accumulating=is_accumulating)
        return self.report()

    @property
    def skipped(self) -> int:
        """Updates that were skipped because gradients were not finite. Reads from the device."""
        return int(self._update.skipped)

    @property
    def grad_norm(self) -> torch.Tensor:
        """The norm of all gradients before the last update clipped them."""
        if self._update.norm is None:
            raise ConfigError("the norm of gradients is only computed for clipping: pass clip_norm=")
        return self._update.norm.clone()

    def report(self) -> Report:
        """What was captured, what it costs, what it served, and why steps ran eagerly."""
        return self._graphs.report()

    def check_addresses(self) -> None:
        """Raises AddressError, naming it, if a parameter, buffer or state of the optimizer has moved."""
        self._graphs.check_addresses()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the states of model, optimizer and scaler: counts, random
        generators, and, in the middle of an accumulation, gradients."""
        gradients = [p.grad for p in self._optimizer.parameters] if self.micro_batches else []
        generators = [generator.get_state() for generator in self._options.generators]
        return {
            "optimizer_steps": self.optimizer_steps,
            "micro_batches": self.micro_batches,
            "skipped": self.skipped,
            "gradients": [None if g is None else g.clone() for g in gradients],
            "rng": torch.get_rng_state(),
            "device_rng": self._pool.backend.rng_state(),
            "generators": generators,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called."""
        if missing := _STATE - set(state):
            raise ConfigError(
                f"this is not the state of a training step: it lacks {', '.join(sorted(missing))}"
            )
        if state["micro_batches"] >= self._accumulate:
            raise ConfigError(
                f"the state has {state['micro_batches']} micro-batches since an update, but this step "
                f"updates after {self._accumulate}: flush() before saving, or use the same accumulate"
            )
        self.optimizer_steps, self.micro_batches = state["optimizer_steps"], state["micro_batches"]
        self._update.skipped.fill_(state["skipped"])
        for parameter, gradient in zip(self._optimizer.parameters, state["gradients"], strict=False):
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
        torch.set_rng_state(state["rng"])
        self._pool.backend.set_rng_state(state["device_rng"])
        for generator, saved in zip(self._options.generators, state["generators"], strict=True):
            generator.set_state(saved)

    # -- one micro-batch ---------------------------------------------------------------------------

    def _follow_the_optimizer(self) -> None:
        """If group numbers have changed or it has hooks, which no graph includes, step after the graphs."""
        if not self._graphs.is_captured or self._optimizer.why_behind is not None:
            return
        why = self._why_not_inside()
        if why is not None and self._graphs.why_not() is None:
            self._optimizer.step_behind(why, static=True)
            is_accumulating = self.micro_batches > 0
            self._graphs.drop(is_accumulating=is_accumulating)
            self._graphs.capture_missing(is_accumulating=is_accumulating)

    def _why_not_inside(self) -> str | None:
        if self._optimizer.hooks:
            return _HAS_HOOKS
        moved = self._optimizer.moved_numbers()
        if not moved:
            return None
        return (
            f"{', '.join(dict.fromkeys(moved))} in its groups changed, which a graph has baked in (a "
            f"scheduler that cycles momentum does that). If it changed for good, call "
            f"step.capture(inputs, targets) to capture again"
        )

    def _prepare(self, updates: bool) -> None:
        if self.micro_batches == 0:
            self._gradients.begin()
        self._gradients.attach()
        if updates:
            self._set_rates()
            self._update.divide_by(self.micro_batches + 1, self._accumulate)

    def _set_rates(self) -> None:
        if self._schedule is None:
            self._optimizer.take_rates()
        else:
            self._optimizer.set_rates(self._schedule(self.optimizer_steps))

    def _has_updated(self) -> None:
        self.optimizer_steps += 1
        self.micro_batches = 0
        self._optimizer.tell_schedulers()
        if self._optimizer.has_stepped and not self._graphs.is_captured:
            self._find_out_where_it_steps()
            self._graphs.follow(is_accumulating=False)
            with self._pool.backend.stream():  # see Note [Memory that stays]
                self._gradients.settle()
            self._graphs.capture_missing(is_accumulating=False)

    def _find_out_where_it_steps(self) -> None:
        if self._optimizer.moves_parameters:
            self._graphs.refuse(_MOVES_PARAMETERS.format(type(self._optimizer.wrapped).__name__))
            return
        error = why_not_in_a_graph(self._optimizer, self._device, self._options)
        if error is not None and self._options.strict:
            raise error
        if error is not None:
            self._optimizer.step_behind(str(error), static=False)
        elif self._optimizer.why_behind is None and self._optimizer.hooks:
            self._optimizer.step_behind(_HAS_HOOKS, static=True)

    def _run(self, graphs: KindGraphs, batch: Batch, shape: BatchShape) -> Any:
        if not self._optimizer.has_stepped:
            with self._values.first_step():
                return self._run_first(graphs, batch, shape)
        runner, reason = graphs.runner, self._graphs.why_not()
        if reason is None:
            decision = runner.decide(shape)
            if not decision.is_eager:
                self.check_addresses()
                result = runner.run(batch, shape)
                self._gradients.hand_over()
                if isinstance(result, torch.Tensor):
                    return result.clone()
                result = map_tensors(torch.Tensor.clone, result)
                if isinstance(result, Stepped):
                    result, left = result
                    self._values.effects.leave(left)
                return result
            reason = decision.reason
        if reason is Reason.LARGER_THAN_MAX and self._is_ladder_made_up:
            longest = self._graphs.rungs.limit
            self._tell_once(f"batches longer than the first ({longest}) run eagerly: pass ladder=[lengths]")
        if reason is Reason.PADDING_DISABLED and len(self._graphs.rungs) == 1:  # else it was logged before
            self._tell_once(f"shorter batches run eagerly: {graphs.why_not_padded}")
        return self._eagerly(runner, batch, shape, reason)

    def _eagerly(self, runner: CudaGraphRunner, batch: Batch, shape: BatchShape, reason: Reason) -> Any:
        copied = {name: tensor.to(self._device, copy=True) for name, tensor in batch.items()}
        return runner.run_eagerly(copied, shape, reason)

    def _run_unseen(self, inputs: Any, targets: Any, does: Kind) -> Any:
        """Run eagerly a batch of a kind that nothing was captured for."""
        self._graphs.eager_steps[Reason.UNSEEN_SIGNATURE] += 1
        kind = BatchKind(inputs, targets, target_pad=IGNORED, with_length=self._loss.takes_mask)
        what_helps = "call step.capture(inputs, targets) to capture them"
        self._tell_once(
            f"batches of other shapes or numbers than the first run eagerly: {kind.opaque or what_helps}"
        )
        matched = kind.batch_of(inputs, targets)
        assert matched is not None
        tensors = {name: tensor.to(self._device, copy=True) for name, tensor in matched[0].items()}
        with torch.no_grad():
            return self._micro_batch(kind, tensors, does, is_rung=False)

    def _run_first(self, graphs: KindGraphs, batch: Batch, shape: BatchShape) -> Any:
        """Steps until the optimizer has created its state. On padded inputs, so that a run resumed here
        continues with exactly the numbers that graphs give."""
        if self._graphs.is_captured:  # a state from before the first update was loaded
            self._graphs.drop(is_accumulating=self.micro_batches > 0)
        runner, rung = graphs.runner, self._graphs.rungs.round_up(shape.num_tokens)
        if rung is None or not (graphs.is_padded or rung == shape.num_tokens):
            return self._eagerly(runner, batch, shape, Reason.FIRST_CALL)
        self._graphs.eager_steps[Reason.FIRST_CALL] += 1
        descriptor = BatchDescriptor(rung, 1, extra=shape.extra)
        runner.buffers.fill(batch, shape, descriptor)
        with torch.no_grad():
            result = runner.step(**runner.arguments(runner.buffers.views(descriptor), descriptor))
        if effects := self._values.effects:
            result, left = graphs.cut(Stepped(result, effects.left_by_the_call()), shape)
            effects.exchange(left)
            return result
        return graphs.cut(result, shape)

    def _tell_once(self, told: str) -> None:
        if told not in self._told:
            self._told.add(told)
            logger.warning(told)

    def _refuse_ambient_autocast(self) -> None:
        if torch.is_autocast_enabled(self._device.type):
            raise ConfigError(
                "a captured step does its own casting: pass autocast=, and call it outside torch.autocast"
            )


def _tell_of_untrained(names: list[str]) -> None:
    if names:
        logger.warning(
            "the optimizer lacks %d parameters of the model (%s%s): the step does not train them, but adds "
            "to their gradients, for another optimizer. If there is none, give them to this one, or freeze "
            "them",
            len(names),
            ", ".join(names[:3]),
            " ..." if len(names) > 3 else "",
        )
