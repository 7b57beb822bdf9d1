"""What a graph can serve (`BatchDescriptor`, part of its key) and what a step needs (`BatchShape`)."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache, total_ordering
from typing import Any, ClassVar, Self

from ..errors import BatchError, ConfigError


@dataclass(frozen=True, slots=True)
class _Batch:
    num_tokens: int
    """Rows of token inputs; for a graph including padding, for a step without."""
    num_reqs: int
    """Rows of request inputs, likewise."""
    query_len: int | None = None
    """The query length of all requests; None: lengths are mixed."""
    lora: int = 0
    """Number of adapters: active in the step, or the maximum that the graph serves (0: no LoRA work)."""
    cascade: bool = False
    """Whether attention runs as a cascade over a shared prefix; a piecewise graph serves both."""
    context: int | None = None
    """The longest context: of the step (0 if it does not matter), or that the graph serves (None: any)."""
    extra: Hashable = None
    """Any other distinction between graphs: opaque here, must be equal in a graph and in its steps."""

    _error: ClassVar[type[ValueError]]
    _least_context: ClassVar[int]
    _limit_sign: ClassVar[str]

    def __post_init__(self) -> None:
        tokens, reqs, query_len = self.num_tokens, self.num_reqs, self.query_len
        if reqs < 1 or tokens < 1:
            raise self._error(
                f"a batch must have at least one request and one token, not {reqs} and {tokens}"
            )
        if query_len is None:
            if reqs > tokens:
                raise self._error(f"{reqs} requests cannot share {tokens} tokens: each needs at least one")
        elif query_len < 1:
            raise self._error(f"the query length must be at least 1, not {query_len}")
        elif tokens != reqs * query_len:
            raise self._error(f"{reqs} requests of {query_len} tokens are {reqs * query_len}, not {tokens}")
        if self.lora < 0 or (self.context is not None and self.context < self._least_context):
            numbers = f"{self.lora} and {self.context}"
            raise self._error(
                f"adapters and context cannot be negative, and a graph's context cannot be 0: {numbers}"
            )

    @classmethod
    def decode(cls, num_reqs: int, query_len: int = 1, **rest: Any) -> Self:
        """A uniform batch; `rest`: the other fields by name."""
        return cls(num_reqs * query_len, num_reqs, query_len, **rest)

    @property
    def is_uniform(self) -> bool:
        """Whether all requests have the same query length."""
        return self.query_len is not None

    @property
    def is_alone(self) -> bool:
        """Whether it is one request with any number of tokens."""
        return self.query_len is None and self.num_reqs == 1 < self.num_tokens

    def __str__(self) -> str:
        uniform = f"decode {self.num_reqs}x{self.query_len}"
        text = uniform if self.is_uniform else f"mixed {self.num_tokens} tokens/{self.num_reqs} reqs"
        text += f" lora{self._limit_sign}{self.lora}" if self.lora else ""
        text += f" context{self._limit_sign}{self.context}" if self.context else ""
        text += " cascade" if self.cascade else ""
        return text + (f" extra={self.extra!r}" if self.extra is not None else "")


@total_ordering
@dataclass(frozen=True, slots=True)
class BatchDescriptor(_Batch):
    """The largest batch that a graph serves. Descriptors order from the cheapest to the most expensive."""

    _error = ConfigError
    _least_context = 1
    _limit_sign = "<="

    @property
    def sort_key(self) -> tuple[int, int, float, int, int, int, bool, str]:
        """Tokens, adapters, context (any counts as the largest), uniform before mixed, then the rest.

        Opaque parts may have types that do not compare, so they order by their repr.
        """
        context = math.inf if self.context is None else self.context
        length = self.query_len or 0
        cost = self.num_tokens, self.lora, context, int(not self.is_uniform)
        return (*cost, self.num_reqs, length, self.cascade, repr(self.extra))

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, BatchDescriptor):
            return NotImplemented
        return self.sort_key < other.sort_key


@dataclass(frozen=True, slots=True)
class BatchShape(_Batch):
    """What one step needs of a graph."""

    context: int = 0
    _error = BatchError
    _least_context = 0
    _limit_sign = "="

    def as_descriptor(self) -> BatchDescriptor:
        """The descriptor of a graph made for exactly this shape."""
        counts = self.num_tokens, self.num_reqs, self.query_len
        return BatchDescriptor(*counts, self.lora, self.cascade, self.context or None, self.extra)


@lru_cache(4096)
def recurring_shape(
    num_tokens: int,
    num_reqs: int,
    query_len: int | None = None,
    lora: int = 0,
    context: int = 0,
    extra: Hashable = None,
) -> BatchShape:
    """A cached `BatchShape`, for steps whose shapes recur."""
    return BatchShape(num_tokens, num_reqs, query_len, lora=lora, context=context, extra=extra)
