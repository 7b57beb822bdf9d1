"""The requests that decode, and for how many steps nothing about them changes.

Note [Longest first]
Attention processes a batch's contexts in order, and programs that begin with the longest end at about the
same time. All requests of a batch grow by a token in each step, so an order by length stays valid.

Note [Steady steps]
Between two changes every step is the previous one, one token further. The number of such steps is known:
until a request needs a page, or reaches the length at which it ends. A step inside such a stretch costs a few
additions, and everything that could change it (an arrival, an end, a page) ends the stretch. When drafts are
verified, a step may produce less than it was given room for: such stretches last longer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .request import IntArray, Request, RequestRows


class DecodeBatch:
    """Requests that decode, as long as none joins or leaves."""

    def __init__(self, requests: Sequence[Request], rows: RequestRows) -> None:
        unordered = np.array([request.row for request in requests], dtype=np.intp)
        order = np.argsort(-rows.num_promised[unordered], kind="stable")
        self._state = rows
        self.requests = tuple([requests[at] for at in order.tolist()])
        """Longest first; see Note [Longest first]."""
        self._places = unordered[order]
        self.rows: IntArray = self._places.astype(np.int32)
        """int32 [R]."""
        self.tenancies: IntArray = rows.tenancy[self._places]
        """int64 [R]."""
        self.num_adapters = rows.num_adapters(self._places)
        """The number of different ones."""
        self.shared_prefix = 0
        """Tokens that all of them begin with, in the same pages..."""
        self.num_twins: int | None = None
        """...as of this value of `RequestPages.num_twins`; None: not looked up yet."""
        self.steady_steps = 0
        """How many next steps repeat the last one, one token further; see Note [Steady steps]."""
        self.num_drafts = 0
        """Drafts of each request in these steps."""

    def look_ahead(self, num_drafts: int = 0) -> None:
        """All have just been scheduled, with this many drafts: compute how many steady steps follow."""
        state, places = self._state, self._places
        self.num_drafts, count = num_drafts, 1 + num_drafts
        if not len(places):
            self.steady_steps = 0
            return
        to_page = int((state.capacity[places] - state.num_scheduled[places]).min()) // count
        to_end = -(-int((state.max_tokens[places] - state.num_promised[places]).min()) // count)
        self.steady_steps = max(0, min(to_page, to_end))

    def advance(self) -> IntArray:
        """Account for a steady step; returns int32 [R], the positions of its tokens."""
        assert self.steady_steps
        self.steady_steps -= 1
        # Read again: what was scheduled beyond the accepted drafts has been taken back since.
        starts = self._state.num_scheduled[self._places]
        self._state.num_scheduled[self._places] = starts + (1 + self.num_drafts)
        self._state.num_promised[self._places] += 1 + self.num_drafts
        return starts
