"""The one-line door: any function or module with a varying batch becomes a set of captured graphs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..capturing.options import CaptureOptions
from ..capturing.pool import GraphPool
from ..dispatching.ladder import Ladder
from ..dispatching.mode import GraphMode
from ..errors import ConfigError
from ..inputs.fields import Scalar
from .graphed_call import GraphedCall
from .wrappers import GraphedFunction, wrap_module


def graphed(
    function: Callable[..., Any],
    *,
    ladder: Ladder | Sequence[int],
    batch_dim: int = 0,
    mode: GraphMode | str = GraphMode.FULL,
    shared: Sequence[str] = (),
    pads: Mapping[str, Scalar] | None = None,
    pool: GraphPool | None = None,
    options: CaptureOptions | None = None,
    compile_up_to: int = 0,
    debug: bool = False,
) -> Any:
    """Serve calls of a function or `nn.Module` from captured graphs, for any batch up to the ladder's limit.

    `f = graphed(model, ladder=[1, 2, 4, 8]); y = f(x)`. The first call captures (or `f.capture(x)` does,
    ahead of time). Larger batches, other signatures, or another autocast or training mode run eagerly and
    are counted under a reason in `f.report()`. Results live in shared memory until the next call: clone
    what must last. They carry no autograd history. What the function returns must have its rows along
    `batch_dim`, too, and must not mix rows (`f.verify()` finds out).

    `mode`: FULL, or PIECEWISE to leave functions marked `@eager_boundary` outside the graphs. `shared`:
    names of arguments that have no batch dimension. `pads`: what padded rows of an argument hold, default
    0. `pool`: memory shared with other wrappers. `compile_up_to`: torch.compile for rungs up to this size.
    `debug`: check addresses before every replay, and detect the use of overwritten results.
    """
    mode = GraphMode.parse(mode)
    if not mode.is_runtime:
        raise ConfigError(f"a wrapper acts as NONE, PIECEWISE or FULL, not as {mode.name}")
    if not callable(function):
        raise ConfigError(f"graphed() needs a function or module, not a {type(function).__name__}")
    if batch_dim < 0:
        raise ConfigError(f"batch_dim counts from the front: {batch_dim} is negative")
    call = GraphedCall(
        function,
        Ladder.of(ladder),
        batch_dim=batch_dim,
        mode=mode,
        shared=tuple(shared),
        pads=dict(pads or {}),
        pool=pool,
        options=options or CaptureOptions(),
        compile_up_to=compile_up_to,
        debug=debug,
    )
    return wrap_module(function, call) if isinstance(function, torch.nn.Module) else GraphedFunction(call)
