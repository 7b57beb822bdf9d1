"""Whether a loss function leaves out targets of -100 by itself.

Note [An index of -100]
A loss function that uses it as an index stops a GPU for good, and the process with it. So it is tried on the
host. One that holds tensors on the device, such as class weights or a reference model, may fail there for
that reason alone: it is then tried on the device as well. In both cases, operations on such a tensor and
integers first run on the host, with other numbers of the same shapes.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..dispatch_mode import WatchingMode
from ..memory import tensors_of
from ..trees import map_tensors
from .batches import IGNORED


def why_not_ignored(loss_fn: Callable[..., Any], outputs: Any, targets: Any) -> str | None:
    """Why a loss function cannot handle ignored targets, or None."""
    ignoring = map_tensors(_partly_ignored, targets)
    with _IndicesOnTheHostFirst():
        error = _error_of(loss_fn, map_tensors(_on_host, outputs), map_tensors(_on_host, ignoring))
        if isinstance(error, RuntimeError):
            error = _error_of(loss_fn, map_tensors(torch.Tensor.detach, outputs), ignoring)
    if error is None:
        return None
    return f"the loss function fails with targets of {IGNORED}: {type(error).__name__}: {error}"


def _error_of(loss_fn: Callable[..., Any], outputs: Any, targets: Any) -> Exception | None:
    try:
        loss_fn(outputs, targets)
    except Exception as error:
        return error
    return None


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    moved = tensor.detach().cpu()
    return moved.float() if moved.is_floating_point() else moved


def _partly_ignored(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone()
    if not copied.is_floating_point() and copied.dim() > 1:
        copied.select(1, -1).fill_(IGNORED)
    return copied


class _IndicesOnTheHostFirst(WatchingMode):
    """Makes an out-of-range index fail on the host before the device sees it: Note [An index of -100]."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        are_integers_given = any(tensor.dtype in (torch.int64, torch.int32) for tensor in given)
        if are_integers_given and any(tensor.device.type != "cpu" for tensor in given):
            if func.namespace not in ("aten", "prims"):
                raise NotImplementedError(f"{func} is given integers and cannot be tried on the host")
            func(*map_tensors(_stand_in, args), **map_tensors(_stand_in, kwargs))
        return func(*args, **kwargs)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """On the host: the same integers, or arbitrary numbers of that shape."""
    if tensor.is_floating_point():
        return torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
    return tensor.cpu()
