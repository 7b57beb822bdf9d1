"""Short names for keys and decisions."""

from collections.abc import Iterable
from typing import Any

from ostinato.graphs.dispatching.descriptor import BatchDescriptor
from ostinato.graphs.dispatching.dispatch import Decision, Dispatcher, Reason
from ostinato.graphs.dispatching.keys import GraphKey
from ostinato.graphs.dispatching.mode import GraphMode

NONE, PIECEWISE, FULL = GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL
FULL_DECODE_ONLY, FULL_AND_PIECEWISE = GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE


def full(num_reqs: int, query_len: int = 1, **rest: Any) -> GraphKey:
    return GraphKey(FULL, BatchDescriptor.decode(num_reqs, query_len, **rest))


def full_mixed(num_tokens: int, num_reqs: int, **rest: Any) -> GraphKey:
    return GraphKey(FULL, BatchDescriptor(num_tokens, num_reqs, **rest))


def piecewise(num_tokens: int, num_reqs: int, **rest: Any) -> GraphKey:
    return GraphKey(PIECEWISE, BatchDescriptor(num_tokens, num_reqs, **rest))


def dispatcher(mode: GraphMode, keys: Iterable[GraphKey], **options: Any) -> Dispatcher:
    made = Dispatcher(mode, **options)
    for key in keys:
        made.add(key)
    return made


def replay(key: GraphKey, reason: Reason, why_not_full: Reason | None = None) -> Decision:
    return Decision(key.mode, key.descriptor, reason, why_not_full)


def eager(reason: Reason) -> Decision:
    return Decision(NONE, None, reason)
