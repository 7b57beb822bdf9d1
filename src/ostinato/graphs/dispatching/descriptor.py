"""What a graph can serve (`BatchDescriptor`, its key) and what a step needs (`BatchShape`)."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import total_ordering

from ..errors import BatchError, ConfigError


def _check_counts(num_tokens: int, num_reqs: int, query_len: int | None, error: type[ValueError]) -> None:
    if num_reqs < 1 or num_tokens < 1:
        raise error(f"a batch has at least one request and one token, not {num_reqs} and {num_tokens}")
    if query_len is None:
        if num_reqs > num_tokens:
            raise error(f"{num_reqs} requests cannot share {num_tokens} tokens: each has at least one")
    elif query_len < 1:
        raise error(f"the query length must be at least 1, not {query_len}")
    elif num_tokens != num_reqs * query_len:
        raise error(f"{num_reqs} requests of {query_len} tokens are {num_reqs * query_len}, not {num_tokens}")


def _describe_size(num_tokens: int, num_reqs: int, query_len: int | None) -> str:
    if query_len is None:
        return f"mixed {num_tokens} tokens/{num_reqs} reqs"
    return f"decode {num_reqs}x{query_len}"


def _describe_rest(cascade: bool, extra: Hashable) -> str:
    return (" cascade" if cascade else "") + (f" extra={extra!r}" if extra is not None else "")


@total_ordering
@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """The key of a graph: the largest batch it serves. Orders from the cheapest to the dearest."""

    num_tokens: int
    """Rows of token inputs."""
    num_reqs: int
    """Rows of request inputs."""
    query_len: int | None = None
    """The one query length all requests have; None: lengths may be mixed."""
    lora: int = 0
    """The most adapters the graph can serve; 0: the base graph, without LoRA work."""
    cascade: bool = False
    """Whether attention runs as a cascade over a shared prefix; a piecewise graph serves both."""
    context: int | None = None
    """The longest context the graph serves; None: any."""
    extra: Hashable = None
    """Whatever else tells graphs apart: opaque here, and the same in every batch that the graph serves."""

    def __post_init__(self) -> None:
        _check_counts(self.num_tokens, self.num_reqs, self.query_len, ConfigError)
        if self.lora < 0:
            raise ConfigError(f"a graph serves 0 or more adapters, not {self.lora}")
        if self.context is not None and self.context < 1:
            raise ConfigError(f"the longest context of a graph must be at least 1, not {self.context}")

    @classmethod
    def decode(
        cls,
        num_reqs: int,
        query_len: int = 1,
        *,
        lora: int = 0,
        cascade: bool = False,
        context: int | None = None,
        extra: Hashable = None,
    ) -> BatchDescriptor:
        """The descriptor of a uniform batch."""
        return cls(num_reqs * query_len, num_reqs, query_len, lora, cascade, context, extra)

    @property
    def is_uniform(self) -> bool:
        """Whether the graph serves one query length only."""
        return self.query_len is not None

    @property
    def sort_key(self) -> tuple[int, int, float, int, int, int, bool, str]:
        """Tokens, adapters, context (any is the most), uniform before mixed; then what tells keys apart.

        Opaque parts may be of types that do not compare, so they order by their repr.
        """
        context = math.inf if self.context is None else self.context
        mixed = 0 if self.is_uniform else 1
        return (
            self.num_tokens,
            self.lora,
            context,
            mixed,
            self.num_reqs,
            self.query_len or 0,
            self.cascade,
            repr(self.extra),
        )

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, BatchDescriptor):
            return NotImplemented
        return self.sort_key < other.sort_key

    def __str__(self) -> str:
        text = _describe_size(self.num_tokens, self.num_reqs, self.query_len)
        if self.lora:
            text += f" lora<={self.lora}"
        if self.context is not None:
            text += f" context<={self.context}"
        return text + _describe_rest(self.cascade, self.extra)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What one step needs of a graph."""

    num_tokens: int
    """Tokens of the batch, without padding."""
    num_reqs: int
    """Requests of the batch, without padding."""
    query_len: int | None = None
    """The one query length all requests have; None: lengths are mixed."""
    lora: int = 0
    """Adapters active in the batch."""
    cascade: bool = False
    """Whether attention runs as a cascade over a shared prefix."""
    context: int = 0
    """The longest context of the batch; 0 where it does not matter."""
    extra: Hashable = None
    """Only graphs with an equal `extra` serve the batch."""

    def __post_init__(self) -> None:
        _check_counts(self.num_tokens, self.num_reqs, self.query_len, BatchError)
        if self.lora < 0 or self.context < 0:
            raise BatchError(f"adapters and context cannot be negative: {self.lora} and {self.context}")

    @classmethod
    def decode(
        cls,
        num_reqs: int,
        query_len: int = 1,
        *,
        lora: int = 0,
        cascade: bool = False,
        context: int = 0,
        extra: Hashable = None,
    ) -> BatchShape:
        """The shape of a uniform batch."""
        return cls(num_reqs * query_len, num_reqs, query_len, lora, cascade, context, extra)

    def as_descriptor(self) -> BatchDescriptor:
        """What a graph made for exactly this shape would serve."""
        return BatchDescriptor(
            self.num_tokens,
            self.num_reqs,
            self.query_len,
            self.lora,
            self.cascade,
            self.context or None,
            self.extra,
        )

    def __str__(self) -> str:
        text = _describe_size(self.num_tokens, self.num_reqs, self.query_len)
        if self.lora:
            text += f" lora={self.lora}"
        if self.context:
            text += f" context={self.context}"
        return text + _describe_rest(self.cascade, self.extra)
