"""The text of one completion as it grows, up to the first stop string."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.text.detokenizer import Detokenizer


class _Pieces:
    """A text as the pieces in which it came. Append-only, so others may read while one thread writes.

    Appending to a string copies it: for a text of n tokens that would happen n times.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._ends = [0]
        """Characters before each piece, and in total."""
        self._joined = (0, "")
        """A number of pieces, and their joined text."""

    def __len__(self) -> int:
        return len(self._pieces)

    def add(self, piece: str) -> None:
        """Append a piece."""
        if piece:
            self._ends.append(self._ends[-1] + len(piece))
            self._pieces.append(piece)

    def joined(self, count: int) -> str:
        """The first `count` pieces."""
        done, text = self._joined
        if count < done:
            return text[: self._ends[count]]
        if count > done:
            text += "".join(self._pieces[done:count])
            self._joined = count, text
        return text

    def since(self, start: int, count: int) -> str:
        """The text of the first `count` pieces after its first `start` characters."""
        first = max(0, bisect_right(self._ends, start, hi=count + 1) - 1)
        return "".join(self._pieces[first:count])[start - self._ends[first] :]


@dataclass(frozen=True)
class _SoFar:
    """The text as it was at one moment."""

    pieces: _Pieces
    count: int

    @property
    def text(self) -> str:
        """All of it."""
        return self.pieces.joined(self.count)

    def since(self, start: int) -> str:
        """The text after its first `start` characters."""
        return self.pieces.since(start, self.count)


class CompletionText:
    """Turns tokens into text and looks for stop strings.

    Without stop strings the text of each step is not needed, so it is made on demand.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        token_ids: list[int],
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
    ) -> None:
        """`token_ids` grows: append to it, or call `push`."""
        self._detokenizer = detokenizer
        self._token_ids = token_ids
        self._stops = tuple(stops)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._include_stop = include_stop
        self._num_decoded = 0
        self._pieces = _Pieces()
        self._held = ""
        self._num_early = 0
        """Characters of `_held` too early to end the text; a match that begins in them may still end it."""

    @property
    def text(self) -> str:
        """The text that can no longer become part of a stop string, so it can be shown at any time."""
        return self.so_far().text

    def since(self, start: int) -> str:
        """`text` after its first `start` characters; costs as much as the returned part is long."""
        return self.so_far().since(start)

    def so_far(self) -> _SoFar:
        """`text` as it is now; may be read in any thread."""
        if not self._stops and self._num_decoded < len(self._token_ids):
            self._pieces.add(self._decoded(len(self._token_ids)))
        return _SoFar(self._pieces, len(self._pieces))

    def push(self, token: int, *, may_stop: bool = True) -> str | None:
        """Add a token; returns the stop string that it completes, if any and if `may_stop`."""
        self._token_ids.append(token)
        return self.find_stop(may_stop=may_stop) if self._stops else None

    def find_stop(self, *, may_stop: bool = True) -> str | None:
        """The stop string completed by the tokens since the last call, if any. Call it after every token."""
        return self._add(self._decoded(len(self._token_ids)), may_stop)

    def finish(self, *, without_last: bool = False) -> str | None:
        """Release what was held back: no further token comes. The last bytes may complete a stop string.

        `without_last`: the last token ended the text and is not part of it.
        """
        new = self._decoded(len(self._token_ids) - without_last) + self._detokenizer.finish()
        self._num_decoded = len(self._token_ids)
        found = self._add(new, may_stop=True)
        if found is None:
            self._pieces.add(self._held)
            self._held = ""
        return found

    def _decoded(self, end: int) -> str:
        """The text of the tokens before `end` that are not decoded yet."""
        begin, self._num_decoded = self._num_decoded, end
        if begin + 1 == end:
            return self._detokenizer.push_one(self._token_ids[begin])
        return self._detokenizer.push(self._token_ids[begin:end])

    def _add(self, new: str, may_stop: bool) -> str | None:
        fresh = self._held + new
        early = self._num_early if may_stop else len(fresh)
        self._held, self._num_early = "", 0
        if self._firsts.isdisjoint(fresh):
            self._pieces.add(fresh)
            return None
        begin = [(stop, max(0, early + 1 - len(stop))) for stop in self._stops]
        found = [(at, stop) for stop, first in begin if (at := fresh.find(stop, first)) >= 0]
        if found:
            at, stop = min(found)
            self._pieces.add(fresh[: at + len(stop) if self._include_stop else at])
            return stop
        settled = _first_beginning(fresh, self._stops)
        self._pieces.add(fresh[:settled])
        self._held, self._num_early = fresh[settled:], max(0, early - settled)
        return None


def _first_beginning(text: str, stops: Sequence[str]) -> int:
    """Where the longest suffix of `text` that could begin a stop string starts."""
    first = len(text)
    for stop in stops:
        at = max(len(text) - len(stop), -1)
        while (at := text.find(stop[0], at + 1, first)) >= 0:
            if stop.startswith(text[at:]):
                first = at
    return first
