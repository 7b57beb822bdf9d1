"""The text of one completion as it grows, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.text.detokenizer import Detokenizer


class CompletionText:
    """Turns tokens into text and looks for stop strings.

    `text` grows only by what can no longer become part of a stop string, so it can be shown at any time.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], *, include_stop: bool) -> None:
        self.text = ""
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, token: int, *, may_stop: bool = True) -> str | None:
        """Add a token; the stop string that it completes, if one."""
        return self._add(self._detokenizer.push([token]), may_stop)

    def finish(self) -> str | None:
        """Give out what was held back: no token comes any more. The last bytes may complete a stop string."""
        found = self._add(self._detokenizer.finish(), may_stop=True)
        if found is None:
            self.text += self._held
            self._held = ""
        return found

    def _add(self, new: str, may_stop: bool) -> str | None:
        if not self._stops:
            self.text += new
            return None
        fresh = self._held + new
        if not may_stop:
            # What came too early to stop anything is settled; it cannot be the beginning of a stop string.
            self.text += fresh
            self._held = ""
            return None
        found = min(((at, stop) for stop in self._stops if (at := fresh.find(stop)) >= 0), default=None)
        if found is not None:
            at, stop = found
            self.text += fresh[: at + len(stop) if self._include_stop else at]
            self._held = ""
            return stop
        keep = _longest_beginning(fresh, self._stops)
        self.text += fresh[: len(fresh) - keep]
        self._held = fresh[len(fresh) - keep :]
        return None


def _longest_beginning(text: str, stops: Sequence[str]) -> int:
    """How many last characters of `text` could be the beginning of a stop string."""
    longest = min(len(text), max(map(len, stops)) - 1)
    for length in range(longest, 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
