"""The door to captured training."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..capturing.pool import GraphPool
from ..dispatching.ladder import Ladder
from ..errors import ConfigError
from ..options import CaptureOptions
from .loss import Loss
from .step import Schedule, TrainStep


def graphed_train_step(
    model: Any,
    loss_fn: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    ladder: Ladder | Sequence[int] | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    schedule: Schedule | None = None,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    compile: bool = False,
    pool: GraphPool | None = None,
    options: CaptureOptions | None = None,
) -> TrainStep:
    """A training step replayed from graphs: forward, loss, backward, clipping, optimizer and schedule.

    `step = graphed_train_step(model, loss_fn, optimizer, ladder=[128, 256]); loss = step(inputs, targets)`.
    Tensors are [batch, length, ...]. `ladder`: the lengths to capture; others are padded to the next one, and
    longer ones run eagerly. Without it there is one: that of the first batch. What is padded is left out of
    the loss, see `Loss`; where that cannot be, only lengths of the ladder are served from graphs. The first
    update runs eagerly, since it makes the optimizer's state; then everything is captured.

    `accumulate`: micro-batches for one update; their gradients are averaged. `clip_norm`: largest norm of all
    gradients. `schedule(i)`: learning rate of update i, or one for each group; without it the groups' own,
    which may change at any time. `autocast`: the type to compute in. `scaler`: its scale follows overflows on
    the device. An update with gradients that are not finite is skipped, `step.skipped` counts.
    `compile`: model and loss function go through torch.compile as one function, for each length of the
    ladder, and its kernels are captured (CUDA only). `pool`: memory shared with other graphs.
    """
    if type(accumulate) is not int or accumulate < 1:
        raise ConfigError(f"accumulate must be a whole number, 1 or more, not {accumulate!r}")
    if clip_norm is not None and not (isinstance(clip_norm, int | float) and clip_norm > 0):
        raise ConfigError(f"clip_norm must be a positive number, not {clip_norm!r}")
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise ConfigError(f"autocast is torch.bfloat16 or torch.float16, not {autocast!r}")
    if isinstance(schedule, torch.optim.lr_scheduler.LRScheduler) or not callable(schedule or max):
        raise ConfigError(
            f"schedule is a function of the number of updates, not a {type(schedule).__name__}: leave it "
            f"out, and let a scheduler of torch step behind each update as ever"
        )
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ConfigError(f"scaler is a torch.amp.GradScaler, not {scaler!r}")
    if not callable(loss_fn):
        raise ConfigError(f"loss_fn is a function of outputs and targets, not {loss_fn!r}")
    loss = Loss(model, loss_fn, autocast, compiled=compile)
    return TrainStep(
        loss,
        optimizer,
        None if ladder is None else Ladder.of(ladder),
        accumulate=accumulate,
        clip_norm=clip_norm,
        schedule=schedule,
        scaler=scaler if scaler is not None and scaler.is_enabled() else None,
        pool=pool,
        options=options or CaptureOptions(),
    )
