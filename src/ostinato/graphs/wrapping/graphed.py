"""The one-line entry point: serves any function or module with a varying batch from captured graphs."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never

from ..capturing.pool import GraphPool
from ..dispatching.ladder import Ladder
from ..dispatching.mode import GraphMode
from ..errors import ConfigError
from ..inputs.fields import Scalar
from ..options import CaptureOptions
from ..results import Results
from .entry import Settings
from .wrappers import wrap


def graphed(
    function: Callable[..., Any] | None = None,
    *,
    ladder: Ladder | Sequence[int],
    batch_dim: int | Mapping[str, int] = 0,
    mode: GraphMode | str = GraphMode.FULL,
    shared: Sequence[str] = (),
    pads: Mapping[str, Scalar] | None = None,
    pool: GraphPool | None = None,
    options: CaptureOptions | None = None,
    compile_up_to: int = 0,
    results: Results | str = Results.COPIED,
    debug: bool = False,
    **unknown: Never,
) -> Any:
    """Serve calls of a function or `nn.Module` from captured graphs, for any batch up to the ladder's limit.

    `f = graphed(model, ladder=[1, 2, 4, 8]); y = f(x)`. The first call captures; `f.capture(x)` captures
    ahead of time. Calls with a larger batch, another signature, or another autocast or training mode run
    eagerly and are counted by reason in `f.report()`. Results are the caller's own tensors. They carry no
    autograd history. Rows must not depend on how many there are: the capture refuses steps that plainly do,
    and `f.verify()` finds the others. Several threads may call a wrapper; their calls take turns.

    Args:
        function: the function or module to wrap. Without it the call returns a decorator, for functions and
            for methods in the body of a class: `@graphed(ladder=[1, 2, 4])`. Each object has its own graphs.
        ladder: the batch sizes to capture; other batches are padded to the next one.
        batch_dim: the dimension of the arguments that counts the rows; by name where arguments differ:
            `{"state": 1}` (those not named: 0). Outputs may count theirs in any dimension.
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
    for name in unknown:
        raise ConfigError(_no_such_option(name))
    mode = GraphMode.parse(mode)
    if not mode.is_runtime:
        raise ConfigError(f"the mode of a wrapper must be NONE, PIECEWISE or FULL, not {mode.name}")
    for dim in batch_dim.values() if isinstance(batch_dim, Mapping) else [batch_dim]:
        if dim < 0:
            raise ConfigError(f"batch_dim counts from the front and must not be negative, as {dim} is")
    if isinstance(batch_dim, Mapping) and (both := sorted(set(batch_dim) & set(shared))):
        raise ConfigError(f"{', '.join(both)} cannot be in batch_dim, because it is in shared")
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
    return _wrapped(function, settings, pool) if function is not None else _Decorator(settings, pool)


_INSTEAD = {"threads": "any number of threads may call one wrapper, and their calls take turns; leave it out"}
"""What there is instead of options that one may look for."""


def _no_such_option(name: str) -> str:
    options = [each for each in inspect.signature(graphed).parameters if each not in ("function", "unknown")]
    near = difflib.get_close_matches(name, options, n=1)
    advice = f"did you mean {near[0]}?" if near else f"its options are {', '.join(options)}"
    return f"graphed() has no option {name}: {_INSTEAD.get(name, advice)}"


class _Decorator:
    """Wraps what it is called with."""

    def __init__(self, settings: Settings, pool: GraphPool | None) -> None:
        self._settings, self._pool = settings, pool

    def __call__(self, function: Callable[..., Any]) -> Any:
        return _wrapped(function, self._settings, self._pool)


def _wrapped(function: Callable[..., Any], settings: Settings, pool: GraphPool | None) -> Any:
    if isinstance(function, staticmethod | classmethod):
        return type(function)(_wrapped(function.__func__, settings, pool))
    if isinstance(function, type):
        raise ConfigError(f"{function.__name__} is a class: wrap its objects, or decorate a method of it")
    if not callable(function):
        raise ConfigError(f"graphed() needs a function or module, not a {type(function).__name__}")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"{function.__name__} is a coroutine function: its work begins after the call. Wrap what it calls"
        )
    return wrap(function, settings, pool)
