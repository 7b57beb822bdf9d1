"""How long a step may wait for grammars, so that no text can hold up all others.

A step waits for a late mask, because leaving its request out costs that request more than a step. Time waited
beyond the usual is taken from an account that fills slowly; when it is empty, steps hardly wait any more, and
requests with slow grammars advance at their own pace.
"""

from __future__ import annotations

import time

_MOST_AT_ONCE = 0.2
_LEAST = 0.01
_CREDIT = 1.0
_SHARE = 0.05


class Patience:
    """In seconds; in the long run at most `_SHARE` of all time, besides the minimum wait."""

    def __init__(self) -> None:
        self._credit = _CREDIT
        self._filled = time.monotonic()

    def now(self) -> float:
        """How long the next wait may take."""
        moment = time.monotonic()
        self._credit = min(_CREDIT, self._credit + _SHARE * (moment - self._filled))
        self._filled = moment
        return max(_LEAST, min(_MOST_AT_ONCE, self._credit))

    def spend(self, seconds: float) -> None:
        """Record how long a wait took."""
        self._credit = max(0.0, self._credit - max(0.0, seconds - _LEAST))
