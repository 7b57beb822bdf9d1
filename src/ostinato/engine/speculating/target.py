"""What speculation needs of the target model: the part of `ModelRunner` that it uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ostinato.cache.kv import KVCache
from ostinato.graphs import GraphPool
from ostinato.kernels.attention.backend import AttentionBackend
from ostinato.kernels.sampling.token_lines import TokenLines
from ostinato.models.drafts.draft import Draft

from ..resolved_config import ResolvedConfig


class Rows(Protocol):
    """State of requests on the device, by row; see `DeviceRows`."""

    def __getitem__(self, name: str) -> Tensor:
        """A field of all rows."""
        ...

    def write(self, name: str, row: int, values: float | Sequence[float], first: int = 0) -> None:
        """Set a field of a row."""
        ...


class Returned(Protocol):
    """Where steps leave their tokens; see `TokenReturn`."""

    lines: TokenLines

    @property
    def state(self) -> dict[str, Tensor]:
        """What steps change and trial runs must not."""
        ...


class Target(Protocol):
    """A model with its rows, its pages and its graphs."""

    config: ResolvedConfig
    pool: GraphPool
    attention: AttentionBackend
    draft: DraftParts | None
    page_table: Tensor
    began: Tensor
    """int64 [1]: when the last decode step began."""
    logits: Tensor
    """float32 [lines, vocab]: of the last step."""
    hidden: Tensor
    """[T, H]: states of the last step of mixed lengths."""

    @property
    def rows(self) -> Rows:
        """Of its requests."""
        ...

    @property
    def returned(self) -> Returned:
        """Lines of tokens."""
        ...

    def verify(self, hidden: Tensor, req_rows: Tensor, query_len: int) -> Tensor:
        """Accept drafts after a forward pass."""
        ...


class DraftParts(NamedTuple):
    """A draft in memory."""

    model: Draft
    kv: KVCache
    """As many pages as the target's, with the same numbers."""


class Bunch(NamedTuple):
    """The layout of the line of a step that verified drafts; see `kernels.speculation.acceptance`."""

    num_requests: int
    """R of the graph that wrote it, padding included."""
    query_len: int
    """Tokens of each request."""
