"""Which graphs there are to capture: the keys, and how modes and ladders make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import ConfigError
from .descriptor import BatchDescriptor
from .ladder import Ladder
from .mode import GraphMode


class GraphKey(NamedTuple):
    """One graph: FULL or PIECEWISE, and the batches it serves."""

    mode: GraphMode
    descriptor: BatchDescriptor


def capture_keys(
    mode: GraphMode | str,
    decode_ladder: Ladder | None,
    token_ladder: Ladder | None,
    *,
    query_len: int = 1,
    max_reqs: int,
    lora_cases: Sequence[int] = (0,),
    context_buckets: Sequence[int | None] = (None,),
    cascade: bool = False,
) -> list[GraphKey]:
    """The graphs to capture for a mode, the largest first.

    `decode_ladder` counts requests (of `query_len` tokens each) and is needed where the decode path is
    FULL; `token_ladder` counts tokens and is needed by every other graph. Piecewise graphs serve both
    paths, any context and cascade attention, so they are listed once. With `cascade` every FULL decode
    graph has a second one for batches that run attention as a cascade.
    """
    mode = GraphMode.parse(mode)
    if max_reqs < 1:
        raise ConfigError(f"max_reqs must be at least 1, not {max_reqs}")
    for name, cases in (("lora_cases", lora_cases), ("context_buckets", context_buckets)):
        if not cases or len(set(cases)) != len(cases):
            raise ConfigError(f"{name} must list at least one case and none twice, not {list(cases)}")
    keys: list[GraphKey] = []
    if mode.decode is GraphMode.FULL:
        if decode_ladder is None:
            raise ConfigError(f"{mode.name} captures decode batches and needs a decode ladder")
        if decode_ladder.limit > max_reqs:
            raise ConfigError(
                f"the decode ladder reaches {decode_ladder.limit} requests and there are never more than "
                f"{max_reqs}"
            )
        keys += [
            GraphKey(
                GraphMode.FULL,
                BatchDescriptor.decode(num_reqs, query_len, lora=lora, cascade=as_cascade, context=context),
            )
            for num_reqs in decode_ladder
            for lora in lora_cases
            for context in context_buckets
            for as_cascade in ((False, True) if cascade else (False,))
        ]
    if mode.mixed is not GraphMode.NONE:
        if token_ladder is None:
            raise ConfigError(f"{mode.name} captures mixed batches and needs a token ladder")
        keys += [
            GraphKey(
                mode.mixed, BatchDescriptor(num_tokens, min(num_tokens, max_reqs), lora=lora, context=context)
            )
            for num_tokens in token_ladder
            for lora in lora_cases
            for context in (context_buckets if mode.mixed is GraphMode.FULL else (None,))
        ]
    return sorted(keys, key=capture_order)


def capture_order(key: GraphKey) -> tuple[Any, ...]:
    """Sorts the largest first: the graph that takes the most memory makes room for the rest."""
    *numbers, extra = key.descriptor.sort_key
    tokens, *rest = (-number for number in numbers)
    return (tokens, key.mode is not GraphMode.FULL, *rest, extra)
