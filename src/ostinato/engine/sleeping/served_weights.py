"""The weights that an engine computes with: replaced in place, versioned, refused while some are missing."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from ostinato.models.transformer import Transformer
from ostinato.models.weight_update import NamedTensors, TornWeightsError, WeightPlaces, update_weights
from ostinato.models.weights import checkpoint_tensors

from ..parameters.sampling_params import RequestError
from .sleeper import Sleeper

DROPPED = "the weights were dropped by sleep(level=2)"


@dataclass(frozen=True)
class WeightsReport:
    """What `update_weights` did."""

    names: tuple[str, ...]
    """Weights that were written, by their names in the checkpoint."""
    num_bytes: int
    version: str
    """Of the weights from now on."""
    missing: int
    """Weights that must be written before anything is generated: after sleep(level=2), or after an update
    that broke off."""
    seconds: float


class ServedWeights:
    """The weights of one engine."""

    def __init__(self, model: Transformer, sleeper: Sleeper, *, allow_nonfinite: bool) -> None:
        """`allow_nonfinite`: updates may bring NaN and infinite weights."""
        self._model, self._sleeper = model, sleeper
        self._allow_nonfinite = allow_nonfinite
        self._places = WeightPlaces(model)
        self._missing: set[str] = set()
        self._num_updates = 0
        self.version = "0"
        """A count of updates, or the name given with the last one."""

    def are_gone(self, why: str) -> None:
        """All of them must be written before the next step."""
        self._missing = set(checkpoint_tensors(self._model))
        self._sleeper.why_no_weights = why

    def rename(self, version: str) -> None:
        """Set the version without changing weights."""
        _check_version(version)
        self.version = version

    def update(self, new: NamedTensors | str | Path, version: str | None) -> WeightsReport:
        """Write new weights in place, all that are given or none. No step may be under way."""
        _check_version("" if version is None else version)
        self._sleeper.refuse_without_weights()
        began = time.perf_counter()
        try:
            if not self._places.are_current:
                self._places = WeightPlaces(self._model)
            allow = self._allow_nonfinite
            written = update_weights(self._model, new, self._places, allow_nonfinite=allow)
        except TornWeightsError as error:
            self.are_gone(str(error))
            raise
        self._missing -= set(written.names)
        if not self._missing:
            self._sleeper.why_no_weights = None
        self._num_updates += 1
        self.version = str(self._num_updates) if version is None else version
        seconds = time.perf_counter() - began
        return WeightsReport(written.names, written.num_bytes, self.version, len(self._missing), seconds)


def _check_version(version: object) -> None:
    if not isinstance(version, str):
        raise RequestError(f"the version of the weights must be a string, not {version!r}")
