"""Parts of a model from graphs, with their backward: for steps that cannot be captured as a whole."""

from collections.abc import Sequence
from typing import Any

import torch

from ..capturing import python_draws
from ..capturing.autocast import clean_autocast_cache
from ..capturing.gate import capture_gate, frozen_gc, turn
from ..capturing.pool import GraphPool
from ..capturing.segments import Bridges
from ..checking.sharded import why_sharded
from ..dispatching.ladder import Ladder, plain_int
from ..dispatching.mode import GraphMode
from ..dispatching.step_mode import step_mode
from ..errors import ConfigError
from ..options import CaptureOptions
from ..trees import tensors_in
from .checkpointing import draws_are_kept
from .in_flight import InFlight
from .part_recording import PartRecorder
from .parts import GraphedPart


def make_graphed_callables(
    callables: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    *,
    sample_kwargs: Any = None,
    enabled: bool = True,
    pool: GraphPool | None = None,
    ladder: Ladder | Sequence[int] | None = None,
    in_flight: int | None = None,
    results: str = "copied",
) -> Any:
    """Serve modules or functions from graphs, forward and backward: torch's call of the same name.

    One callable or a tuple of them, with sample arguments for each. A module is returned itself, with another
    `forward`. More rows than captured, arguments of another kind, or another training mode run eagerly and
    are counted in `forward.eager_steps`. An input gets a gradient only if it has `requires_grad` in the
    samples. `sample_kwargs`, `enabled`: as in TransformerEngine.

    Args:
        callables: modules or functions. Those of one list may be called, and differentiated, in any order.
        sample_args: arguments of each, a tuple or a tensor. The first tensor tells the number of rows;
            arguments with another size along dimension 0 are taken as having none.
        num_warmup_iters: eager runs before recording, which leave no trace.
        allow_unused_input: allow parameters and inputs that get no gradient.
        pool: memory shared with other graphs, for what no backward needs.
        ladder: numbers of rows to capture, along dimension 0; default: that of the samples. Fewer rows are
            padded.
        in_flight: how many calls of each part may wait for their backward, each with memory of its own, as in
            pipelines, or if a part is used several times in a step. A further one raises. By default one;
            further ones run eagerly, with a warning.
        results: "copied", or "guarded" to save the copy: results then are in memory that a later call of the
            part overwrites, and using one afterwards raises.
    """
    is_single = not isinstance(callables, tuple | list)
    functions = (callables,) if is_single else tuple(callables)
    samples = (sample_args,) if is_single else tuple(sample_args)
    keywords = ({},) * len(functions) if sample_kwargs is None else sample_kwargs
    keywords = (keywords,) if isinstance(keywords, dict) else tuple(keywords)
    if len(samples) != len(functions) or len(keywords) != len(functions):
        raise ConfigError(
            f"sample_args and sample_kwargs must match the {len(functions)} callables, not {len(samples)}"
        )
    if pool is not None and not isinstance(pool, GraphPool):
        raise ConfigError("pool must be an ostinato.graphs.GraphPool, not one of torch's pool handles")
    if not enabled:
        return callables
    if in_flight is not None and plain_int(in_flight) < 1:
        raise ConfigError(f"in_flight must be at least 1, not {in_flight}")
    if results not in ("copied", "guarded"):
        raise ConfigError(f'results must be "copied" or "guarded", not {results!r}')
    _refuse_some(functions)
    samples = tuple(sample if isinstance(sample, tuple) else (sample,) for sample in samples)
    pool = pool or GraphPool(_device_of(functions, samples))
    rungs = None if ladder is None else Ladder.of(ladder)
    num_places = plain_int(in_flight or 1)
    parts = [
        GraphedPart(
            number,
            f,
            args,
            kwargs,
            rungs,
            pool,
            InFlight(number, num_places),
            may_wait=in_flight is None,
            guards_results=results == "guarded",
            allow_unused=allow_unused_input,
        )
        for number, (f, args, kwargs) in enumerate(zip(functions, samples, keywords, strict=True))
    ]
    _capture([part.recorder for part in parts], num_places, pool, CaptureOptions(warmups=num_warmup_iters))
    served = []
    for function, part in zip(functions, parts, strict=True):
        if isinstance(function, torch.nn.Module):
            function.forward = part
        served.append(function if isinstance(function, torch.nn.Module) else part)
    for part in parts:
        part.settle()
    return served[0] if is_single else tuple(served)


def _refuse_some(functions: Sequence[Any]) -> None:
    for number, function in enumerate(functions):
        why_not = why_sharded(function.modules()) if isinstance(function, torch.nn.Module) else None
        if why_not is not None:
            raise ConfigError(f"part {number}: {why_not}. The model is unchanged")
        if isinstance(function, torch.jit.ScriptModule):
            raise ConfigError(
                f"part {number} is a torch.jit.ScriptModule, whose parameters cannot be followed: pass the "
                f"module that it was made from"
            )
        if any(function is other for other in functions[:number]):
            raise ConfigError(
                f"part {number} is listed twice: list it once, and pass in_flight= the number of its calls "
                f"before the backward"
            )


def _capture(
    parts: Sequence[PartRecorder], num_places: int, pool: GraphPool, options: CaptureOptions
) -> None:
    """Largest capture size first; see Note [Calls in flight]."""
    bridges = Bridges(pool.allocate)
    with (
        turn,
        capture_gate(),
        frozen_gc(options.freeze_gc),
        pool.backend.stream(),
        torch.inference_mode(False),
        python_draws.undone(),
        draws_are_kept(),
    ):
        with clean_autocast_cache(), step_mode(GraphMode.NONE):
            for part in parts:
                part.find_written(options)
            for part in parts:
                with part.undone_in_python():
                    part.find_dependence_on_the_batch(options)
            for part in parts:
                with part.undone_in_python():
                    for rung in reversed(part.ladder):
                        part.warm_up(rung, options.warmups, options)
                        for place in range(num_places):
                            part.record_forward(rung, place, bridges, options)
                            part.record_backward(rung, place, bridges, options)
                        part.release()


def _device_of(functions: Sequence[Any], samples: Sequence[Any]) -> torch.device:
    parameters = [p for f in functions if isinstance(f, torch.nn.Module) for p in f.parameters()]
    devices = [tensor.device for tensor in (*parameters, *tensors_in(samples))]
    if not devices:
        raise ConfigError("no device to capture on: a callable with parameters or a sample tensor is needed")
    return next((device for device in devices if device.type != "cpu"), devices[0])
