"""Parts of a model from graphs, with their backward: for steps that cannot be captured as a whole."""

from collections.abc import Sequence
from typing import Any

import torch

from ..capturing import python_draws
from ..capturing.autocast import clean_autocast_cache
from ..capturing.gate import capture_gate, frozen_gc, turn
from ..capturing.pool import GraphPool
from ..capturing.segments import Bridges
from ..dispatching.ladder import Ladder
from ..dispatching.mode import GraphMode
from ..dispatching.step_mode import step_mode
from ..errors import ConfigError
from ..options import CaptureOptions
from ..trees import tensors_in
from .checkpointing import draws_are_kept
from .parts import GraphedPart
from .rounds import Rounds


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
) -> Any:
    """Serve modules or functions from graphs, forward and backward: torch's call of the same name.

    One callable or a tuple of them, with sample arguments for each; call them in this order. A module is
    returned itself, with another `forward`. `ladder`: numbers of rows to capture, along dimension 0; by
    default that of the samples. Fewer rows are padded; more rows, arguments of another kind, or another
    training mode run eagerly and are counted in `forward.eager_steps`. An input gets a gradient only if it
    has `requires_grad` in the samples. `sample_kwargs`, `enabled`: as in TransformerEngine. `pool`: memory
    shared with other graphs.
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
    samples = tuple(sample if isinstance(sample, tuple) else (sample,) for sample in samples)
    pool = pool or GraphPool(_device_of(functions, samples))
    rungs = None if ladder is None else Ladder.of(ladder)
    rounds = Rounds()
    parts = [
        GraphedPart(number, f, args, kwargs, rungs, pool, rounds, allow_unused=allow_unused_input)
        for number, (f, args, kwargs) in enumerate(zip(functions, samples, keywords, strict=True))
    ]
    _capture(parts, pool, CaptureOptions(warmups=num_warmup_iters))
    served = []
    for function, part in zip(functions, parts, strict=True):
        if isinstance(function, torch.nn.Module):
            function.forward = part
        served.append(function if isinstance(function, torch.nn.Module) else part)
    for part in parts:
        part.settle()
    return served[0] if is_single else tuple(served)


def _capture(parts: Sequence[GraphedPart], pool: GraphPool, options: CaptureOptions) -> None:
    """Largest rung first; within a rung forward in order, backward in reverse."""
    bridges = Bridges(pool.allocate)
    rungs = sorted({rung for part in parts for rung in part.ladder}, reverse=True)
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
                part.find_dependence_on_the_batch(options)
            for rung in rungs:
                present = [part for part in parts if rung in part.ladder]
                for part in present:
                    part.warm_up(rung, options.warmups, options)
                for part in present:
                    part.record_forward(rung, bridges, options)
                for part in reversed(present):
                    part.record_backward(rung, bridges, options)


def _device_of(functions: Sequence[Any], samples: Sequence[Any]) -> torch.device:
    parameters = [p for f in functions if isinstance(f, torch.nn.Module) for p in f.parameters()]
    devices = [tensor.device for tensor in (*parameters, *tensors_in(samples))]
    if not devices:
        raise ConfigError("no device to capture on: a callable with parameters or a sample tensor is needed")
    return next((device for device in devices if device.type != "cpu"), devices[0])
