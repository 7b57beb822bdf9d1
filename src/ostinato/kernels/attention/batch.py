"""What attention must know about a step: which token belongs to which request, and where its KV lives.

A step works on T tokens of R requests, flattened one request after another:

    query_starts   0        3  4              query_lens  3 1 2
    tokens       [ a a a  | b | c c | . . ]   "." is padding: row 0, position 0
    positions      5 6 7    9   0 1   0 0     seq_lens    8 10 2 (then 1 for padded requests)

The KV of position p of a request is in page `page_table[row, p // PAGE_SIZE]`, at place `p % PAGE_SIZE`.
Page 0 and row 0 belong to padding and to no request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..constants import PAGE_SIZE

WINDOW_ALIGNMENT = 128
"""With a window, keys are read from the first one in it on, rounded down to at most a multiple of this: pages
that lie before need not be there, and the page table may have page 0 in their place."""


@dataclass(frozen=True)
class AttentionBatch:
    """The static buffers a captured attention reads, and the two host values its shapes follow from.

    Invariant: token `query_starts[r] + i` of request r has position `seq_lens[r] - query_lens[r] + i` and
    row `req_rows[r]`. Nothing else may be assumed; a request may have `query_lens` 0.
    """

    page_table: Tensor
    """int32 [max_rows, max_pages_per_request], contiguous; row 0 is all zeros."""

    token_rows: Tensor
    """int32 [T]: the page-table row of each token's request; padding 0."""

    positions: Tensor
    """int64 [T]: 0-based position of each token in its request."""

    req_rows: Tensor
    """int32 [R]: the page-table row of each request; padding 0."""

    seq_lens: Tensor
    """int32 [R]: context length including this step's tokens; padding 1."""

    query_starts: Tensor
    """int32 [R]: the request's first token in the flattened batch; padding 0."""

    query_lens: Tensor
    """int32 [R]: tokens of the request in this step; padding 0."""

    max_query_len: int
    """No request has more tokens than this in any step the graph serves; 1 for decode."""

    max_context: int
    """No request is longer than this in any step the graph serves."""

    equal_places: bool = False
    """Whether request r has the places r * max_query_len to (r + 1) * max_query_len - 1: its tokens in the
    first `query_lens[r]` of them, padding in the others. So it is wherever `max_query_len` is 1."""

    prefix_lens: Tensor | None = None
    """int32 [max_rows]: so many of its first positions, whole pages and not all of its context, a row has in
    common with every other row of the batch; 0 for row 0. Attention may read these once for all, from the
    pages of the first request. Only for single tokens. None: nothing is known to be shared."""

    def paged(self, k_cache: Tensor, v_cache: Tensor) -> "PagedTokens":
        """Returns the tokens of the step with the cache of a layer."""
        return PagedTokens(k_cache, v_cache, self.page_table, self.token_rows, self.positions)

    @property
    def requests(self) -> "Requests":
        """Returns the requests of the step."""
        return Requests(self.req_rows, self.seq_lens, self.query_starts, self.query_lens)

    def prefix_lens_for(self, sliding_window: int | None) -> Tensor | None:
        """`prefix_lens`, for a layer in which every token sees all of the prefix."""
        sees_all = sliding_window is None or sliding_window >= self.max_context
        return self.prefix_lens if sees_all else None

    def last_places(self) -> Tensor:
        """int32 [R]: where each request's last token is among all; padding has the first place."""
        return (self.query_starts + self.query_lens - 1).clamp(min=0)

    def of_last_tokens(self) -> "AttentionBatch":
        """Returns the batch of each request's last token alone, as in a step that decodes it."""
        count = self.query_lens.clamp(max=1)  # one without tokens is padding here
        return AttentionBatch(
            page_table=self.page_table,
            token_rows=self.req_rows * count,
            positions=((self.seq_lens - 1) * count).long(),
            req_rows=self.req_rows,
            seq_lens=self.seq_lens,
            query_starts=torch.arange(count.size(0), dtype=torch.int32, device=count.device),
            query_lens=count,
            max_query_len=1,
            max_context=self.max_context,
        )

    def slots(self) -> Tensor:
        """int64 [T]: where each token's KV goes, counted in positions over the whole cache."""
        return self.slots_at(self.token_rows, self.positions)

    def contexts(self, rows: Tensor, positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Returns the slots that tokens at `positions` of the requests in `rows` see, and which count.

        Both [n, width]: the last `width` positions up to the token's own. All layers of a step ask the same,
        so it is worked out once for the step's own tokens.
        """
        if rows is not self.token_rows:
            return self._contexts(rows, positions, width)
        if width not in self._known_contexts:
            self._known_contexts[width] = self._contexts(rows, positions, width)
        return self._known_contexts[width]

    @cached_property
    def _known_contexts(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}

    def _contexts(self, rows: Tensor, positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
        last = positions.unsqueeze(1)
        seen = torch.arange(width, device=rows.device) + (last - width + 1).clamp(min=0)
        # What may not be seen is replaced by the token's own position, which is always there.
        return self.slots_at(rows.unsqueeze(1), torch.minimum(seen, last)), seen <= last

    def slots_at(self, rows: Tensor, positions: Tensor) -> Tensor:
        """int64: where the KV of `positions` of the requests in `rows` is; the two broadcast together."""
        places = rows.long() * self.page_table.size(1) + positions // PAGE_SIZE
        pages = self.page_table.view(-1).index_select(0, places.view(-1)).view(places.shape)
        return pages.long() * PAGE_SIZE + positions % PAGE_SIZE


class PagedTokens(NamedTuple):
    """The cache of a layer and where the tokens of a step are in it, as kernels take them."""

    k_cache: Tensor
    """[pages, PAGE_SIZE, Hkv, D]."""
    v_cache: Tensor
    page_table: Tensor
    token_rows: Tensor
    positions: Tensor


class Requests(NamedTuple):
    """The requests of a step, as kernels take them; fields as in `AttentionBatch`."""

    req_rows: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    query_lens: Tensor


class HeadPreparation(NamedTuple):
    """Norm and rotation of one layer's heads, between their projection and attention."""

    rotary: Tensor
    """float32 [positions, D]: cos of the D/2 angles of each position, then their sin."""

    q_norm: Tensor | None = None
    """[D]: weight of the norm of each query head; None: no norm, neither of queries nor of keys."""

    k_norm: Tensor | None = None
    """[D]: of each key head."""

    eps: float = 1e-6
    """Of both norms."""


@dataclass(frozen=True)
class HostLengths:
    """The lengths of the real requests of a step, as the host knows them; saves an eager step a readback."""

    query_starts: Sequence[int]
    """First token of each request; request i here is request i of the batch."""

    query_lens: Sequence[int]
    """Tokens of each request in this step."""

    seq_lens: Sequence[int]
    """Context length of each request, this step's tokens included."""

    @classmethod
    def read(cls, batch: AttentionBatch) -> "HostLengths":
        """Read them back from the device: waits for it, and is refused inside a captured step."""
        return cls(batch.query_starts.tolist(), batch.query_lens.tolist(), batch.seq_lens.tolist())
