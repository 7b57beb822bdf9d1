"""Which graphs to capture: the keys, and how they follow from modes and ladders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..errors import ConfigError
from .descriptor import BatchDescriptor
from .ladder import Ladder, plain_int
from .mode import GraphMode


class GraphKey(NamedTuple):
    """The key of a graph: FULL or PIECEWISE, and the batches it serves."""

    mode: GraphMode
    descriptor: BatchDescriptor


def capture_keys(
    mode: GraphMode | str,
    decode_ladder: Ladder | Iterable[int] | None,
    token_ladder: Ladder | Iterable[int] | None,
    *,
    query_len: int = 1,
    max_reqs: int,
    lora_cases: Sequence[int] = (0,),
    context_buckets: Sequence[int | None] = (None,),
    cascade: bool = False,
) -> list[GraphKey]:
    """The keys of the graphs to capture for a mode, largest first.

    A ladder is a `Ladder` or a list of sizes. `decode_ladder` counts requests (of `query_len` tokens each)
    and is required if the decode path is FULL; `token_ladder` counts tokens and is required for all other
    graphs. Piecewise graphs serve both paths, any context and cascade attention, so each is listed once. With
    `cascade`, every FULL decode graph gets a second one for batches whose attention runs as a cascade.
    """
    mode = GraphMode.parse(mode)
    decode_ladder = None if decode_ladder is None else Ladder.of(decode_ladder)
    token_ladder = None if token_ladder is None else Ladder.of(token_ladder)
    query_len, max_reqs = plain_int(query_len), plain_int(max_reqs)
    if max_reqs < 1:
        raise ConfigError(f"max_reqs must be at least 1, not {max_reqs}")
    for name, cases in (("lora_cases", lora_cases), ("context_buckets", context_buckets)):
        if not cases or len(set(cases)) != len(cases):
            raise ConfigError(f"{name} must list at least one value and none twice, not {list(cases)}")
    keys: list[GraphKey] = []
    if mode.decode is GraphMode.FULL:
        if decode_ladder is None:
            raise ConfigError(f"mode {mode.name} captures decode batches and needs a decode ladder")
        if decode_ladder.limit > max_reqs:
            raise ConfigError(
                f"the decode ladder goes up to {decode_ladder.limit} requests, but there are never more than "
                f"{max_reqs} (max_reqs)"
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
            raise ConfigError(f"mode {mode.name} captures mixed batches and needs a token ladder")
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
    """Sort key, largest first: the others then fit into the memory that the largest graph takes."""
    *numbers, extra = key.descriptor.sort_key
    tokens, *rest = (-number for number in numbers)
    return (tokens, key.mode is not GraphMode.FULL, *rest, extra)
