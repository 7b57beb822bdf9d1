"""What requests ask of sampling, and which of a step's requests ask for more than plain sampling does."""

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
from .drawn_logprobs import Change


class Kind(IntEnum):
    """What a sampling graph can do; each one all that the smaller ones can."""

    PLAIN = 0
    """Greedy, or random with a temperature and a seed; for all requests of a step."""
    ADJUSTED = 1
    """Also penalties, biases, bans, masks and logprobs; for those that ask."""
    FILTERED = 2
    """Also top-k, top-p and min-p; for those that ask."""

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
"""Which numpy compares with in a third of the time."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """Requests of a step whose logprobs are those of the distribution that they draw from."""

    rows: IntArray
    """int32 [n]."""
    places: IntArray
    """int32 [n]: which requests of the step they are."""
    change: Change
    """The largest of theirs."""
    num_top: int
    """The most alternatives that one of them asks for."""


@dataclass(frozen=True, eq=False)
class Asking:
    """The requests of a step that ask for more, those that ask for logprobs first."""

    kind: Kind
    """The cheapest that serves them all."""
    rows: IntArray
    """int32 [n]: their rows."""
    places: IntArray
    """int32 [n]: which requests of the step they are."""
    told: IntArray
    """int64: the places of those that ask for logprobs."""
    drawn: Drawn | None = None
    """Those that ask for logprobs under another distribution than the model's."""


class RowKinds:
    """What the tenant of each row asks for, on the host."""

    def __init__(self, num_rows: int, *, tells_drawn: bool = False) -> None:
        """`tells_drawn`: logprobs are those of the distribution that tokens are drawn from, and not those of
        the model itself."""
        self._tells_drawn = tells_drawn
        self.kinds = np.zeros(num_rows, dtype=np.int8)
        self.wants_logprobs = np.zeros(num_rows, dtype=bool)
        """Of sampling graphs."""
        self.wants_whole = np.zeros(num_rows, dtype=bool)
        """See `whole_logprobs`."""
        self._may_want_whole = False
        self.changes = np.zeros(num_rows, dtype=np.int8)
        """What their logprobs know of, and those of the model do not; see `drawn_logprobs`."""
        self.num_drawn = np.full(num_rows, -1, dtype=np.int32)
        """Alternatives that those ask for whose logprobs are made beside the graphs; -1: the others."""

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Tenants of rows that come inside are gone at the end."""
        before = copy.deepcopy(vars(self))
        try:
            yield
        finally:
            vars(self).update(before)

    def set(self, row: int, params: SamplingParams, is_processed: bool) -> Kind:
        """The row has a new tenant."""
        self.kinds[row] = kind = Kind.of(params, is_processed)
        self.changes[row] = change = Change.of(params, is_processed) if self._tells_drawn else Change.NOTHING
        # What functions make of the logits is no matter to those who are told of it.
        whole = wants_whole(params, is_processed and not self._tells_drawn)
        is_drawn = change > Change.NOTHING and params.wants_logprobs and not whole
        self.wants_whole[row] = whole
        self.num_drawn[row] = (params.logprobs or 0) if is_drawn else -1
        self.wants_logprobs[row] = params.wants_logprobs and not whole and not is_drawn
        self._may_want_whole = whole or (self._may_want_whole and bool(self.wants_whole.any()))
        return kind

    def wanting_whole(self, step: ScheduledStep, *, drawn: bool) -> list[int]:
        """Which requests of a step sample and want whole distributions: those they draw from, or, of all
        others, those of the model."""
        if not self._may_want_whole:
            return []
        wanted = self.wants_whole & ((self.changes > Change.NOTHING) == drawn)
        found: list[int] = np.flatnonzero(wanted[step.rows] & step.samples).tolist()
        return found

    def asking(self, step: ScheduledStep, served: IntArray | None = None) -> Asking | None:
        """Who asks for more in this step, but those that are served in another way; None: nobody."""
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
