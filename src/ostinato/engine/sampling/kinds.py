"""What requests need of sampling, and which requests of a step need more than plain sampling."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from ..parameters.sampling_params import SamplingParams
from ..scheduling.request import IntArray
from ..scheduling.scheduled_step import ScheduledStep
from ..stepping.whole_logprobs import wants_whole
from .logprobs import Change


class Kind(IntEnum):
    """What a sampling graph can do; each kind includes the smaller ones."""

    PLAIN = 0
    """Greedy, or random with a temperature and a seed; for all requests of a step."""
    ADJUSTED = 1
    """Also penalties, biases, bans, masks and logprobs; for the requests that use them."""
    FILTERED = 2
    """Also top-k, top-p and min-p; for the requests that use them."""

    @classmethod
    def of(cls, params: SamplingParams, is_processed: bool = False) -> Kind:
        """The cheapest kind that serves these parameters; `is_processed`: functions change the logits."""
        if not params.is_greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0):
            return cls.FILTERED
        if params.has_penalties or params.logit_bias or params.min_tokens or params.wants_logprobs:
            return cls.ADJUSTED
        if params.structured_outputs is not None or params.allowed_token_ids is not None:
            return cls.ADJUSTED
        if params.bad_words or is_processed:
            return cls.ADJUSTED
        return cls.PLAIN


_PLAIN = int(Kind.PLAIN)
"""A plain int, which numpy compares in a third of the time."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """Requests of a step that want logprobs under the distribution that they draw from."""

    rows: IntArray
    """int32 [n]."""
    places: IntArray
    """int32 [n]: their indices in the step."""
    change: Change
    """The largest of theirs."""
    num_top: int
    """The most alternatives that one of them asks for."""


@dataclass(frozen=True, eq=False)
class Asking:
    """The requests of a step that need more than plain sampling, those with logprobs first."""

    kind: Kind
    """The cheapest that serves them all."""
    rows: IntArray
    """int32 [n]: their rows."""
    places: IntArray
    """int32 [n]: their indices in the step."""
    told: IntArray
    """int64: the indices of those with logprobs."""
    drawn: Drawn | None = None
    """Those with logprobs under another distribution than the model's."""


class RowKinds:
    """What the tenant of each row needs, on the host."""

    def __init__(self, num_rows: int, *, tells_drawn: bool = False) -> None:
        """`tells_drawn`: logprobs are under the distribution that tokens are drawn from, not the model's."""
        self._tells_drawn = tells_drawn
        self.kinds = np.zeros(num_rows, dtype=np.int8)
        self.wants_logprobs = np.zeros(num_rows, dtype=bool)
        """From sampling graphs."""
        self.wants_whole = np.zeros(num_rows, dtype=bool)
        """See `whole_logprobs`."""
        self._may_want_whole = False
        self.changes = np.zeros(num_rows, dtype=np.int8)
        """What their logprobs include and the model's do not; see `drawn_logprobs`."""
        self.num_drawn = np.full(num_rows, -1, dtype=np.int32)
        """Alternatives of requests whose logprobs are computed outside the graphs; -1: all other requests."""

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Tenants that come inside are undone at the end."""
        before = copy.deepcopy(vars(self))
        try:
            yield
        finally:
            vars(self).update(before)

    def set(self, row: int, params: SamplingParams, is_processed: bool) -> Kind:
        """The row has a new tenant."""
        self.kinds[row] = kind = Kind.of(params, is_processed)
        self.changes[row] = change = Change.of(params, is_processed) if self._tells_drawn else Change.NOTHING
        # With `tells_drawn`, changes made by functions belong to the returned distribution.
        whole = wants_whole(params, is_processed and not self._tells_drawn)
        is_drawn = change > Change.NOTHING and params.wants_logprobs and not whole
        self.wants_whole[row] = whole
        self.num_drawn[row] = (params.logprobs or 0) if is_drawn else -1
        self.wants_logprobs[row] = params.wants_logprobs and not whole and not is_drawn
        self._may_want_whole = whole or (self._may_want_whole and bool(self.wants_whole.any()))
        return kind

    def wanting_whole(self, step: ScheduledStep, *, drawn: bool) -> list[int]:
        """The requests of a step that sample and want whole distributions: with `drawn` those that draw from
        a changed one, else those that draw from the model's."""
        if not self._may_want_whole:
            return []
        wanted = self.wants_whole & ((self.changes > Change.NOTHING) == drawn)
        found: list[int] = np.flatnonzero(wanted[step.rows] & step.samples).tolist()
        return found

    def asking(self, step: ScheduledStep, served: IntArray | None = None) -> Asking | None:
        """The requests of this step that need more, except `served` ones; None: there are none."""
        asks = self.kinds[step.rows] > _PLAIN
        if not np.count_nonzero(asks):
            return None
        if served is not None:
            asks &= ~served
        if not step.is_uniform_decode:
            asks &= step.samples
        places = np.flatnonzero(asks)
        if not len(places):
            return None
        is_told = self.wants_logprobs[step.rows[places]]
        told = places[is_told]
        places = np.concatenate([told, places[~is_told]])
        rows = step.rows[places]
        kind = Kind(int(self.kinds[rows].max()))
        return Asking(kind, rows, places.astype(np.int32), told, self._drawn(rows, places))

    def _drawn(self, rows: IntArray, places: IntArray) -> Drawn | None:
        most = self.num_drawn[rows]
        is_drawn = most >= 0
        if not is_drawn.any():
            return None
        rows, places = rows[is_drawn], places[is_drawn]
        return Drawn(rows, places, Change(int(self.changes[rows].max())), int(most.max()))
