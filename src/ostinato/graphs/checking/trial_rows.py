"""Runs the step of a runner on the batches of its graphs, and cuts the real rows out of what it returns."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch

from ..capturing.captured import CapturedGraph
from ..capturing.trial import Trials
from ..dispatching.descriptor import BatchDescriptor, BatchShape
from ..dispatching.keys import GraphKey
from ..errors import VerifyError
from ..inputs.buffers import Batch, InputBuffers
from ..trees import leaves_of
from ..trimming import Trimmer, same_constant
from .differences import difference

_SMALLEST = 1e-5
"""Numbers of results that are smaller are not told from zero."""


class Verifiable(Protocol):
    """What verification needs from a runner."""

    step: Callable[..., Any]
    buffers: InputBuffers
    graphs: dict[GraphKey, CapturedGraph]
    sinks: dict[str, torch.Tensor]
    outputs: Trimmer
    rows_are_independent: bool
    """Whether no row of the step depends on another, by its owner's word."""

    def arguments(
        self, inputs: Mapping[str, torch.Tensor], descriptor: BatchDescriptor
    ) -> dict[str, Any]: ...

    def trials(self) -> Trials: ...

    def launch(self, graph: CapturedGraph) -> None: ...

    def poison_surroundings(self) -> None: ...


def shapes_to_try(descriptor: BatchDescriptor, others: Iterable[BatchDescriptor] = ()) -> list[BatchShape]:
    """Returns a full batch, and one that is mostly padding, or as much of it as calls ever get. `others`:
    the graphs beside this one, of which a smaller one serves what fits into it."""
    full = BatchShape(
        descriptor.num_tokens,
        descriptor.num_reqs,
        descriptor.query_len,
        lora=descriptor.lora,
        context=descriptor.context or 0,
        cascade=descriptor.cascade,
        extra=descriptor.extra,
    )
    if 1 in (full.num_reqs, full.num_tokens):
        return [full]
    part = part_of(full, 3)
    smaller = [each for each in others if each < descriptor and _kind(each) == _kind(descriptor)]
    if smaller:
        largest = max(smaller)
        reqs = min(max(part.num_reqs, largest.num_reqs + 1), full.num_reqs)
        tokens = min(max(part.num_tokens, largest.num_tokens + 1), full.num_tokens)
        part = (
            replace(full, num_tokens=reqs * full.query_len, num_reqs=reqs)
            if full.query_len
            else replace(part, num_tokens=tokens)
        )
    return [full] if part == full else [full, part]


def _kind(descriptor: BatchDescriptor) -> tuple[Any, ...]:
    """Returns all of it but how large it is."""
    return (
        descriptor.query_len,
        descriptor.lora,
        descriptor.cascade,
        descriptor.context,
        descriptor.extra,
    )


def part_of(full: BatchShape, times: int) -> BatchShape:
    reqs = max(1, full.num_reqs // times)
    tokens = reqs * full.query_len if full.query_len else max(reqs, full.num_tokens // times)
    return replace(full, num_tokens=tokens, num_reqs=reqs)


def eager_rows(runner: Verifiable, graph: CapturedGraph, shape: BatchShape) -> list[Any]:
    """The real rows of the eager step on the contents of the buffers."""
    inputs = runner.buffers.views(graph.descriptor)
    leaves = leaves_of(runner.step(**runner.arguments(inputs, graph.descriptor)))
    if len(leaves) != len(graph.leaves):
        raise VerifyError(
            f"the eager step returns {len(leaves)} values, but the graph for {graph.descriptor} returns "
            f"{len(graph.leaves)}: the step has changed since the capture; capture again"
        )
    return real_rows(runner, leaves, shape)


def unpadded_inputs(runner: Verifiable, batch: Batch, shape: BatchShape) -> dict[str, torch.Tensor]:
    """The batch on the device, without padding, in copies: the step may write into its inputs."""
    return {name: tensor.clone() for name, tensor in runner.buffers.on_device(batch, shape).items()}


def on_copies(runner: Verifiable, inputs: Mapping[str, torch.Tensor], shape: BatchShape) -> list[Any]:
    """What the eager step returns for inputs of its own."""
    leaves = leaves_of(runner.step(**runner.arguments(inputs, shape.as_descriptor())))
    return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def real_rows(runner: Verifiable, leaves: list[Any], shape: BatchShape) -> list[Any]:
    return [
        runner.outputs.trim(position, leaf, shape).clone() if isinstance(leaf, torch.Tensor) else leaf
        for position, leaf in enumerate(leaves)
    ]


def dependence(
    names: list[str], got: list[Any], unpadded: list[Any], allowed: Callable[[torch.dtype], float]
) -> tuple[float, str | None]:
    """The largest difference, and the first output that differs by more than allowed."""
    if len(got) != len(unpadded):
        return float("inf"), "the structure of the output"
    worst, dependent = 0.0, None
    for name, a, b in zip(names, got, unpadded, strict=True):
        if not isinstance(a, torch.Tensor):
            off, limit = (0.0 if same_constant(a, b) else float("inf")), 0.0
        else:
            off = difference(a, b, floor=_SMALLEST)
            limit = allowed(a.dtype)
        worst, dependent = max(worst, off), dependent or (name if off > limit else None)
    return worst, dependent
