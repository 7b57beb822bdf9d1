"""The entry point for captured training."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..capturing.pool import GraphPool
from ..dispatching.ladder import Ladder
from ..errors import ConfigError
from ..options import CaptureOptions
from .loss import Loss
from .step import Schedule, TrainStep
from .wrapped import refuse_what_is_spread, unwrapped


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
    Tensors are [batch, length, ...]. The first update runs eagerly, because it creates the optimizer's state;
    then everything is captured.

    Args:
        model: the module to train.
        loss_fn: a function of outputs and targets that returns the loss.
        optimizer: the optimizer of the model's parameters.
        ladder: the lengths to capture. Other lengths are padded to the next one; longer ones run eagerly.
            Default: only the length of the first batch. Padding is left out of the loss, see `Loss`; if that
                is not possible, graphs serve only lengths of the ladder.
        accumulate: micro-batches per update; their gradients are averaged.
        clip_norm: maximum norm of all gradients together.
        schedule: function of the number of an update that returns its learning rate, or one per parameter
            group. Without it the groups' own rates apply, which may change at any time.
        autocast: the type to compute in.
        scaler: a gradient scaler; its scale follows overflows on the device. An update whose gradients are
            not finite is skipped and counted in `step.skipped`.
        compile: compile model and loss function as one function with torch.compile, for each length of the
            ladder, and capture its kernels (CUDA only).
        pool: memory to share with other graphs.
        options: settings of the capture.
    """
    if type(accumulate) is not int or accumulate < 1:
        raise ConfigError(f"accumulate must be an integer of at least 1, not {accumulate!r}")
    if clip_norm is not None and not (isinstance(clip_norm, int | float) and clip_norm > 0):
        raise ConfigError(f"clip_norm must be a positive number, not {clip_norm!r}")
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise ConfigError(f"autocast must be torch.bfloat16 or torch.float16, not {autocast!r}")
    if isinstance(schedule, torch.optim.lr_scheduler.LRScheduler) or not callable(schedule or max):
        raise ConfigError(
            f"schedule must be a function of the number of updates, not a {type(schedule).__name__}: leave "
            f"it out, and step a torch scheduler after each update as usual"
        )
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ConfigError(f"scaler must be a torch.amp.GradScaler, not {scaler!r}")
    if not callable(loss_fn):
        raise ConfigError(f"loss_fn must be a function of outputs and targets, not {loss_fn!r}")
    refuse_what_is_spread([part for part in (model, loss_fn) if isinstance(part, torch.nn.Module)])
    inside = unwrapped(optimizer, scaler, accumulate)
    loss, scaler = Loss(model, loss_fn, autocast, compiled=compile), inside.scaler
    return TrainStep(
        loss,
        inside.optimizer,
        None if ladder is None else Ladder.of(ladder),
        accumulate=accumulate,
        clip_norm=clip_norm,
        schedule=schedule,
        scaler=scaler if scaler is not None and scaler.is_enabled() else None,
        pool=pool,
        options=options or CaptureOptions(),
    )
