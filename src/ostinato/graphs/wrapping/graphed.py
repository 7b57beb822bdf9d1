"""The one-line entry point: serves any function or module with a varying batch from captured graphs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..capturing.pool import GraphPool
from ..dispatching.ladder import Ladder, plain_int
from ..dispatching.mode import GraphMode
from ..errors import ConfigError
from ..inputs.fields import Scalar
from ..options import CaptureOptions
from ..results import Results
from .entry import Settings
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
    results: Results | str = Results.COPIED,
    debug: bool = False,
) -> Any:
    """Serve calls of a function or `nn.Module` from captured graphs, for any batch up to the ladder's limit.

    `f = graphed(model, ladder=[1, 2, 4, 8]); y = f(x)`. The first call captures; `f.capture(x)` captures
    ahead of time. Calls with a larger batch, another signature, or another autocast or training mode run
    eagerly and are counted by reason in `f.report()`. Results are the caller's own tensors. They carry no
    autograd history. Rows must not depend on how many there are: the capture refuses steps that plainly do,
    and `f.verify()` finds the others. Several threads may call a wrapper; their calls take turns.

    Args:
        function: the function or module to wrap.
        ladder: the batch sizes to capture; other batches are padded to the next one.
        batch_dim: the dimension of the arguments that counts the rows.
        mode: FULL, or PIECEWISE to leave functions marked `@eager_boundary` outside the graphs.
        shared: names of arguments without a batch dimension.
        pads: what padded rows of an argument hold; default: 0.
        pool: memory to share with other wrappers; default: a new pool.
        options: settings of the capture.
        compile_up_to: use torch.compile for rungs up to this size.
        results: "copied", or "guarded" to save the copy: results then are in memory that the next call of any
            wrapper on the pool overwrites, and using one after that raises StaleOutputError. Such a wrapper
            belongs to the thread that calls it first.
        debug: check addresses before every replay.
    """
    mode = GraphMode.parse(mode)
    if not mode.is_runtime:
        raise ConfigError(f"the mode of a wrapper must be NONE, PIECEWISE or FULL, not {mode.name}")
    if not callable(function):
        raise ConfigError(f"graphed() needs a function or module, not a {type(function).__name__}")
    batch_dim, compile_up_to = plain_int(batch_dim), plain_int(compile_up_to)
    if batch_dim < 0:
        raise ConfigError(f"batch_dim counts from the front and must not be negative, as {batch_dim} is")
    kind = Results.parse(results)
    if kind is Results.UNGUARDED:
        raise ConfigError("results of a wrapper are copied or guarded; only a CudaGraphRunner has others")
    settings = Settings(
        ladder=Ladder.of(ladder),
        batch_dim=batch_dim,
        mode=mode,
        shared=tuple(shared),
        pads=dict(pads or {}),
        options=options or CaptureOptions(),
        compile_up_to=compile_up_to,
        results=kind,
        debug=debug,
    )
    return wrap(function, settings, pool)
