"""How long a step may wait for grammars, so that nobody's text can hold up those of others.

A step waits for a mask that is late, since to leave its request out costs that more than a step. What has
been waited beyond the usual is taken from an account that fills slowly; when it is empty steps wait for next
to nothing, and requests with slow grammars go at a pace of their own.
"""

from __future__ import annotations

import time

_MOST_AT_ONCE = 0.2
_LEAST = 0.01
_CREDIT = 1.0
_SHARE = 0.05


class Patience:
    """Seconds; at most `_SHARE` of all time in the long run, beside the least."""

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
        """So long it took."""
        self._credit = max(0.0, self._credit - max(0.0, seconds - _LEAST))
