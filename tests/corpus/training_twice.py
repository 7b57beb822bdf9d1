"""Ordinary training programs, run twice: from graphs, and as the plain eager loop.

    @program
    def a_classifier(run):
        model = ...
        step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters()))
        return [step(x, y) for x, y in batches], model

`run.train_step` has the signature of `graphed_train_step`, `run.parts` that of `make_graphed_callables`; in
the eager run both give what a user would have written without. What the program returns (losses, models,
optimizers, logs, in any nesting) is compared.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from corpus import registry
from ostinato.graphs import TrainStep, graphed_train_step, make_graphed_callables

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Fused here as they are from graphs, unless the program asks for something else."""
FLAGS = {"fused", "foreach", "capturable"}


def program(function: Callable[["Run"], Any]) -> Callable[["Run"], Any]:
    """Registers a training program under its name, and its file as a tag."""

    def body(world: registry.World) -> None:
        run = Run(world)
        world.keep(seen(function(run), run))

    subject = function.__module__.rpartition("_")[2]
    name = function.__name__.replace("_", " ")
    registry.program(f"training: {name}", ["training", subject])(body)
    return function


class Run:
    """One of the two runs of a program."""

    def __init__(self, world: registry.World):
        self.world, self.device, self.graphs = world, world.device, world.graphs

    def train_step(self, model: Any, loss_fn: Any, optimizer: Any, **options: Any) -> Any:
        """Makes a training step: `graphed_train_step`, or the plain loop."""
        step = (graphed_train_step if self.graphs else EagerStep)(model, loss_fn, optimizer, **options)
        self.world.report_of(step)
        return step

    def parts(self, callables: Any, sample_args: Any, **options: Any) -> Any:
        """Makes parts of a model: `make_graphed_callables`, or the parts as they are."""
        if not self.graphs:
            return callables
        made = make_graphed_callables(callables, sample_args, **options)
        for part in made if isinstance(made, tuple) else (made,):
            graphed = getattr(part, "forward", part)
            self.world.report_of(SimpleNamespace(report=lambda part=graphed: report_of_part(part)))
        return made


def loss_in(result: Any) -> torch.Tensor:
    """Returns the loss among the results of a loss function."""
    if isinstance(result, tuple):
        return result[0]
    if isinstance(result, Mapping):
        return result["loss"]
    return getattr(result, "loss", result)


def report_of_part(part: Any) -> Any:
    """Returns what the runner asks of a report."""
    eager = getattr(part, "eager_steps", Counter())
    return SimpleNamespace(replays=getattr(part, "replays", 0), eager_steps=eager, failures={})


def seen(value: Any, run: Run) -> Any:
    """Returns what a user can see of a result: states of optimizers and the like, gradients of models."""
    if isinstance(value, nn.Module):
        gradients = {name: p.grad for name, p in value.named_parameters()}
        return {"module": value, "modes": [m.training for m in value.modules()], "gradients": gradients}
    if isinstance(value, torch.optim.Optimizer):
        state = value.state_dict()
        groups = [{k: v for k, v in group.items() if k not in FLAGS} for group in state["param_groups"]]
        return {**state, "param_groups": groups}
    if isinstance(value, EagerStep | TrainStep):
        return {"updates": int(value.optimizer_steps), "skipped": int(value.skipped)}
    if isinstance(value, Mapping):
        return {k: seen(v, run) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [seen(v, run) for v in value]
    if hasattr(value, "state_dict"):
        return value.state_dict()
    return value


class EagerStep:
    """The plain loop: forward, loss, backward, clipping, optimizer."""

    def __init__(
        self,
        model: Any,
        loss_fn: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        *,
        ladder: Any = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        schedule: Callable[[int], Any] | None = None,
        autocast: torch.dtype | None = None,
        scaler: torch.amp.GradScaler | None = None,
        compile: bool = False,
    ):
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.accumulate, self.clip_norm, self.schedule = accumulate, clip_norm, schedule
        self.autocast, self.scaler = autocast, scaler
        self.micro_batches = self.optimizer_steps = self.skipped = 0
        self.grad_norm: Any = None
        try:
            self.masked = "mask" in inspect.signature(loss_fn).parameters
        except ValueError:
            self.masked = False
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if type(getattr(optimizer, "optimizer", optimizer)) in FUSED and all(
            p.is_floating_point() for p in parameters
        ):
            for group in optimizer.param_groups:
                if all(group.get(flag) is None for flag in ("fused", "foreach")):
                    group["fused"] = True

    def __call__(self, inputs: Any, targets: Any = None, *, last: bool = False) -> Any:
        if self.micro_batches == 0:
            self.optimizer.zero_grad()
        device = self.optimizer.param_groups[0]["params"][0].device.type
        with torch.autocast(device, self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            outputs = self.call(inputs)
            mask = (
                {"mask": torch.ones(targets.shape[:2], device=device, dtype=torch.bool)}
                if self.masked
                else {}
            )
            result = self.loss_fn(outputs, targets, **mask)
            loss = loss_in(result)
            if loss.dim() > 0:
                result = loss = loss.mean()
        scaled = loss / self.accumulate
        (self.scaler.scale(scaled) if self.scaler else scaled).backward()
        self.micro_batches += 1
        if last or self.micro_batches == self.accumulate:
            self.flush()
        return tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, result)

    def call(self, inputs: Any) -> Any:
        if isinstance(inputs, Mapping):
            return self.model(**inputs)
        return self.model(*inputs) if isinstance(inputs, tuple) else self.model(inputs)

    def flush(self) -> None:
        if not self.micro_batches:
            return
        parameters = [
            p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        if self.micro_batches < self.accumulate:
            for p in parameters:
                p.grad.mul_(self.accumulate / self.micro_batches)
        self.micro_batches = 0
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        if self.schedule is not None:
            rates = self.schedule(self.optimizer_steps)
            groups = self.optimizer.param_groups
            rates = rates if isinstance(rates, list | tuple) else [rates] * len(groups)
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        if self.clip_norm is not None:
            self.grad_norm = torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif all(bool(p.grad.isfinite().all()) for p in parameters):
            self.optimizer.step()
        else:
            self.skipped += 1
        self.optimizer_steps += 1

    def capture(self, *_: Any) -> None:
        """Does nothing: the plain loop has no graphs."""

    def state_dict(self) -> dict[str, Any]:
        random = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
        return {"random": random, "optimizer_steps": self.optimizer_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["random"][0])
        torch.cuda.set_rng_state_all(state["random"][1:])
        self.optimizer_steps = state["optimizer_steps"]
