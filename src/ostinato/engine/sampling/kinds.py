"""What requests ask of sampling, and which of a step's requests ask for more than plain sampling does."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from ..sampling_params import SamplingParams
from ..scheduling.request import IntArray
from ..scheduling.scheduled_step import ScheduledStep


class Kind(IntEnum):
    """What a sampling graph can do; each one all that the smaller ones can."""

    PLAIN = 0
    """Greedy, or random with a temperature and a seed; for all requests of a step."""
    ADJUSTED = 1
    """Also penalties, biases, bans, grammars and logprobs; for those that ask."""
    FILTERED = 2
    """Also top-k, top-p and min-p; for those that ask."""

    @classmethod
    def of(cls, params: SamplingParams) -> Kind:
        """The cheapest kind that serves these parameters."""
        if not params.is_greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0):
            return cls.FILTERED
        if params.has_penalties or params.logit_bias or params.min_tokens or params.logprobs is not None:
            return cls.ADJUSTED
        if params.structured_outputs is not None:
            return cls.ADJUSTED
        return cls.PLAIN


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


class RowKinds:
    """What the tenant of each row asks for, on the host."""

    def __init__(self, num_rows: int) -> None:
        self.kinds = np.zeros(num_rows, dtype=np.int8)
        self.wants_logprobs = np.zeros(num_rows, dtype=bool)

    def set(self, row: int, params: SamplingParams) -> Kind:
        """The row has a new tenant."""
        kind = Kind.of(params)
        self.kinds[row], self.wants_logprobs[row] = kind, params.logprobs is not None
        return kind

    def asking(self, step: ScheduledStep) -> Asking | None:
        """Who asks for more in this step; None: nobody."""
        asks = self.kinds[step.rows] > Kind.PLAIN
        if not step.is_uniform_decode:
            asks &= step.samples
        places = np.flatnonzero(asks)
        if not len(places):
            return None
        is_told = self.wants_logprobs[step.rows[places]]
        told = places[is_told]
        places = np.concatenate([told, places[~is_told]])
        rows = step.rows[places]
        return Asking(Kind(int(self.kinds[rows].max())), rows, places.astype(np.int32), told)
