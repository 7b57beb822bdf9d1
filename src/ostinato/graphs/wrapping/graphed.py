"""The one-line door: any function or module with a varying batch becomes a set of captured graphs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..capturing.pool import GraphPool
from ..dispatching.ladder import Ladder
from ..dispatching.mode import GraphMode
from ..errors import ConfigError
from ..inputs.fields import Scalar
from ..options import CaptureOptions
from .graphed_call import Settings
from .wrappers import wrap


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
    threads: bool = False,
    debug: bool = False,
) -> Any:
    """Serve calls of a function or `nn.Module` from captured graphs, for any batch up to the ladder's limit.

    `f = graphed(model, ladder=[1, 2, 4, 8]); y = f(x)`. The first call captures (or `f.capture(x)` does,
    ahead of time). Larger batches, other signatures, or another autocast or training mode run eagerly and
    are counted under a reason in `f.report()`. Results live in shared memory until the next call: clone
    what must last. They carry no autograd history. Rows must not depend on how many there are: the capture
    refuses what is plainly so, `f.verify()` finds the rest.

    `mode`: FULL, or PIECEWISE to leave functions marked `@eager_boundary` outside the graphs. `shared`:
    names of arguments that have no batch dimension. `pads`: what padded rows of an argument hold, default
    0. `pool`: memory shared with other wrappers. `compile_up_to`: torch.compile for rungs up to this size.
    `threads`: let several threads call; they take turns, and results are copies. Without it a wrapper belongs
    to the thread that calls it first. `debug`: check addresses before every replay, and detect the use of
    overwritten results.
    """
    mode = GraphMode.parse(mode)
    if not mode.is_runtime:
        raise ConfigError(f"a wrapper acts as NONE, PIECEWISE or FULL, not as {mode.name}")
    if not callable(function):
        raise ConfigError(f"graphed() needs a function or module, not a {type(function).__name__}")
    if batch_dim < 0:
        raise ConfigError(f"batch_dim counts from the front: {batch_dim} is negative")
    settings = Settings(
        ladder=Ladder.of(ladder),
        batch_dim=batch_dim,
        mode=mode,
        shared=tuple(shared),
        pads=dict(pads or {}),
        options=options or CaptureOptions(),
        compile_up_to=compile_up_to,
        threads=threads,
        debug=debug,
    )
    return wrap(function, settings, pool)
