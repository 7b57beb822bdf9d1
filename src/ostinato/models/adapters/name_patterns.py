"""Matches regular expressions against names of layers in time linear in the name.

An adapter's configuration may come from a client, and `re` backtracks: ten characters can take longer
than anybody waits, in the process that serves everybody. Here an expression becomes a nondeterministic
automaton that is followed in all its states at once (Thompson 1968). Greediness does not decide if a name
matches, so nothing is lost. Expressions that need backtracking (back references, lookarounds) are refused.
"""

from __future__ import annotations

import functools
import re
from re import _constants as kinds  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

MAX_CHARACTERS = 4096
MAX_STATES = 2_000
"""States of an automaton: bounded repetitions are written out."""
_PLAIN = re.compile(r"(?:[\w.-]|\\\.)*")
"""Names with dots: these cannot backtrack, and configurations may have one for each layer."""
_REPEATS = (kinds.MAX_REPEAT, kinds.MIN_REPEAT)
_BEGINNINGS = (kinds.AT_BEGINNING, kinds.AT_BEGINNING_STRING)
_ENDS = (kinds.AT_END, kinds.AT_END_STRING)


class NamePattern:
    """An expression that whole names match or do not."""

    def __init__(self, expression: str) -> None:
        """Raises ValueError if it is not an expression, or needs what is not supported."""
        if len(expression) > MAX_CHARACTERS:
            raise ValueError(f"an expression may have {MAX_CHARACTERS} characters, not {len(expression)}")
        self.is_plain = _PLAIN.fullmatch(expression) is not None
        """Matched by `re` itself, which is quicker."""
        if self.is_plain:
            self.matches = lambda name: re.fullmatch(expression, name) is not None  # type: ignore[method-assign]
            return
        try:
            parsed = parser.parse(expression)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{expression[:200]!r} is not a regular expression: {error}") from None
        if parsed.state.flags & ~re.UNICODE:
            raise ValueError(f"{expression[:200]!r} sets flags, which are not supported")
        self._expression = expression
        # A state reads a character and goes on, or is left for others without reading one.
        self._reads: list[Any] = []
        self._next: list[list[int]] = []
        self._start = self._state()
        try:
            self._end = self._sequence(parsed, self._start)
        except RecursionError:
            raise ValueError(f"{expression[:200]!r} is nested too deep") from None

    def matches(self, name: str) -> bool:
        """Returns if the whole name matches."""
        states = self._reachable({self._start}, at_beginning=True, at_end=not name)
        for position, character in enumerate(name):
            read = {
                self._next[s][0] for s in states if self._reads[s] is not None and self._takes(s, character)
            }
            if not read:
                return False
            states = self._reachable(read, at_beginning=False, at_end=position + 1 == len(name))
        return self._end in states

    # -- construction ------------------------------------------------------------------------------

    def _state(self, reads: Any = None) -> int:
        if len(self._reads) == MAX_STATES:
            raise ValueError(f"{self._expression[:200]!r} has too many repetitions")
        self._reads.append(reads)
        self._next.append([])
        return len(self._reads) - 1

    def _sequence(self, parts: Any, at: int) -> int:
        """Appends states that read these parts behind a state; returns the last."""
        for kind, given in parts:
            at = self._part(kind, given, at)
        return at

    def _part(self, kind: Any, given: Any, at: int) -> int:
        if kind in (kinds.LITERAL, kinds.NOT_LITERAL, kinds.ANY, kinds.IN):
            reading, behind = self._state((kind, given)), self._state()
            self._next[at].append(reading)
            self._next[reading].append(behind)
            return behind
        if kind is kinds.SUBPATTERN:
            _, added, removed, inside = given
            if added or removed:
                raise ValueError(f"{self._expression[:200]!r} sets flags, which are not supported")
            return self._sequence(inside, at)
        if kind is kinds.BRANCH:
            behind = self._state()
            for branch in given[1]:
                begin = self._state()
                self._next[at].append(begin)
                self._next[self._sequence(branch, begin)].append(behind)
            return behind
        if kind in _REPEATS:
            least, most, inside = given
            return self._repetition(least, most, inside, at)
        if kind is kinds.AT and given in (*_BEGINNINGS, *_ENDS):
            guard, behind = self._state((kind, given)), self._state()
            self._next[at].append(guard)
            self._next[guard].append(behind)
            return behind
        name = str(kind).lower().replace("_", " ")
        raise ValueError(
            f"{self._expression[:200]!r} contains {name}, which is not supported in names of layers"
        )

    def _repetition(self, least: int, most: Any, inside: Any, at: int) -> int:
        for _ in range(least):
            begin = self._state()  # one at least, so that repetitions of nothing are bounded, too
            self._next[at].append(begin)
            at = self._sequence(inside, begin)
        if most is kinds.MAXREPEAT:
            begin, behind = self._state(), self._state()
            self._next[at].append(begin)
            self._next[begin].append(behind)
            self._next[self._sequence(inside, begin)].append(begin)
            return behind
        behind = self._state()
        for _ in range(most - least):
            begin = self._state()
            self._next[at] += [begin, behind]
            at = self._sequence(inside, begin)
        self._next[at].append(behind)
        return behind

    # -- following ---------------------------------------------------------------------------------

    def _reachable(self, states: set[int], *, at_beginning: bool, at_end: bool) -> set[int]:
        """Returns these states and those behind them that need no character."""
        left, found = list(states), set(states)
        while left:
            state = left.pop()
            reads = self._reads[state]
            if reads is not None:
                kind, given = reads
                if kind is not kinds.AT or not (at_beginning if given in _BEGINNINGS else at_end):
                    continue
            for behind in self._next[state]:
                if behind not in found:
                    found.add(behind)
                    left.append(behind)
        return found

    def _takes(self, state: int, character: str) -> bool:
        kind, given = self._reads[state]
        if kind is kinds.AT:
            return False
        if kind is kinds.LITERAL:
            return ord(character) == given
        if kind is kinds.NOT_LITERAL:
            return ord(character) != given
        return character != "\n" if kind is kinds.ANY else _is_among(character, given)


def _is_among(character: str, entries: Any) -> bool:
    """Returns if a character is in a class such as `[a-z_]`."""
    is_negated = bool(entries) and entries[0][0] is kinds.NEGATE
    for kind, given in entries[is_negated:]:
        if (
            (kind is kinds.LITERAL and ord(character) == given)
            or (kind is kinds.RANGE and given[0] <= ord(character) <= given[1])
            or (kind is kinds.CATEGORY and _CATEGORIES[given].fullmatch(character))
        ):
            return not is_negated
    return is_negated


_CATEGORIES = {
    kinds.CATEGORY_DIGIT: re.compile(r"\d"),
    kinds.CATEGORY_NOT_DIGIT: re.compile(r"\D"),
    kinds.CATEGORY_SPACE: re.compile(r"\s"),
    kinds.CATEGORY_NOT_SPACE: re.compile(r"\S"),
    kinds.CATEGORY_WORD: re.compile(r"\w"),
    kinds.CATEGORY_NOT_WORD: re.compile(r"\W"),
}


@functools.lru_cache(maxsize=256)
def pattern(expression: str) -> NamePattern:
    """Returns the pattern of an expression, made once."""
    return NamePattern(expression)
