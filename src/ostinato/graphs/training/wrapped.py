"""Models and optimizers as libraries wrap them: unwrapped where a graph does the same, refused by name where
no graph can. That is decided before anything is tried, because a trial may leave a reducer or sharded
parameters in a state that torch cannot go on from.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..checking.sharded import why_sharded
from ..errors import ConfigError

_HOST_KNOWS_WHO_IS_USED = (
    "DistributedDataParallel(find_unused_parameters=True) reads on the host, in every step, which parameters "
    "were used: leave it out, and out of the model what is never used"
)
_TIED_TO_THE_HOST = (
    "DistributedDataParallel reads times of its steps on the host, and keeps autograd nodes that belong to "
    "the default stream, which no CUDA graph may use: on a single GPU pass the module inside (model.module)"
)


class Unwrapped(NamedTuple):
    """What a graph records of an optimizer that a library prepared."""

    optimizer: Any
    scaler: torch.amp.GradScaler | None


def unwrapped(optimizer: Any, scaler: torch.amp.GradScaler | None, accumulate: int) -> Unwrapped:
    """The optimizer inside that of `accelerate.Accelerator.prepare`, and its scaler, if it has one."""
    accelerate: Any = sys.modules.get("accelerate.optimizer")
    if accelerate is None or not isinstance(optimizer, accelerate.AcceleratedOptimizer):
        return Unwrapped(optimizer, scaler)
    micro_batches = optimizer.gradient_state.num_steps
    if micro_batches not in (1, accumulate):
        raise ConfigError(
            f"the Accelerator accumulates {micro_batches} micro-batches for an update, but this step "
            f"{accumulate}: pass accumulate={micro_batches}, and call the step for every micro-batch"
        )
    return Unwrapped(optimizer.optimizer, scaler or optimizer.scaler)


def refuse_what_is_spread(modules: Sequence[torch.nn.Module]) -> None:
    """Raises ConfigError for models whose parameters are spread over devices, or come and go."""
    why_not = why_sharded(module for _, module in _all_of(modules))
    if why_not is not None:
        raise ConfigError(f"{why_not}. The model is unchanged")
    for name, module in _all_of(modules):
        if isinstance(module, torch.nn.parallel.DistributedDataParallel) and module.static_graph:
            raise ConfigError(
                "DistributedDataParallel(static_graph=True) counts its first steps and expects each to have "
                "a backward pass, but trial runs come in between: leave static_graph=True out. The model is "
                "unchanged"
            )
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and is_traceable_wrapper_subclass(tensor):
                _refuse_subclass(f"{name}.{key}" if name else key, tensor)


def why_not_recorded(modules: Sequence[torch.nn.Module], device: torch.device) -> str | None:
    """Why steps of these models run eagerly, if it is a wrapper's doing."""
    ddp = torch.nn.parallel.DistributedDataParallel
    replicas = [module for _, module in _all_of(modules) if isinstance(module, ddp)]
    if replicas and device.type == "cuda":
        return _TIED_TO_THE_HOST
    return _HOST_KNOWS_WHO_IS_USED if any(each.find_unused_parameters for each in replicas) else None


@contextmanager
def without_reduction(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """A context for trials: gradients stay in this process. What is tried depends on its batch, so other
    processes would wait for gradients that never come, or take a trial's for those of a step."""
    ddp = torch.nn.parallel.DistributedDataParallel
    replicas = [module for _, module in _all_of(modules) if isinstance(module, ddp)]
    synchronised = [(each, each.require_forward_param_sync) for each in replicas]
    try:
        with ExitStack() as stack:
            for each in replicas:
                stack.enter_context(each.no_sync())
                each.require_forward_param_sync = False  # no buffers either
            yield
    finally:
        for each, was in synchronised:
            each.require_forward_param_sync = was


def _all_of(modules: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    return [named for root in modules for named in root.named_modules()]


def _refuse_subclass(name: str, tensor: torch.Tensor) -> None:
    raise ConfigError(
        f"{name} is a {type(tensor).__name__}, a kind of tensor that consists of others, which a training "
        f"step cannot record yet: train with plain tensors"
    )
