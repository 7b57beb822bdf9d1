"""A text under a grammar, and the grammar with all texts under it, as the engine sees them."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from ostinato.text.grammar import Mask

from .layout import Verdict
from .process import GrammarProcess


class Standing(Enum):
    """Where a text stands."""

    COMPILING = "compiling"
    """Its grammar is not ready to be followed, or has to be made ready once more."""
    READY = "ready"
    """It is, and the text can begin, or go on from where it was: `catch_up`."""
    ASKED = "asked"
    """What may come next has been asked and not been answered."""
    FOLLOWS = "follows"
    """`fill` says what may come next."""
    COMPLETE = "complete"
    """It has ended as the grammar wants it."""
    REFUSED = "refused"
    """It has a token that its grammar does not allow."""
    DEAD_END = "dead end"
    """Its grammar allows no token here."""
    FAILED = "failed"
    """It cannot be followed; `error` says why."""


_TOLD = {
    Verdict.FOLLOWS: Standing.FOLLOWS,
    Verdict.COMPLETE: Standing.COMPLETE,
    Verdict.REFUSED: Standing.REFUSED,
    Verdict.DEAD_END: Standing.DEAD_END,
}


class Entries(Protocol):
    """Who looks after the grammars that are in use."""

    def join(self, text: FollowedText) -> None:
        """A text is wanted."""

    def leave(self, text: FollowedText) -> None:
        """A text is not wanted any more."""


class FollowedText:
    """Made by `GrammarHost.text`; `begin` once it is wanted, `close` when it is not any more."""

    def __init__(self, host: Entries, entry: GrammarEntry) -> None:
        self._host = host
        self.entry = entry
        self._slot: int | None = None
        self._asked = self._answered = 0
        self._verdict = Verdict.FOLLOWS
        self.is_parked = False
        """Whether its request waits for it: changes are told by `GrammarHost.attend`."""
        self.num_tokens = 0
        """Tokens that its grammar has been shown."""
        self.strikes = 0
        """How often the process of its grammar died or hung over it."""
        self.error: str | None = None
        """Why it cannot be followed."""
        self.is_at_fault = True
        """Whether that is for what was asked."""

    @property
    def standing(self) -> Standing:
        """Where it stands; `GrammarHost.attend` and `settle` bring it on."""
        if self.error is not None:
            return Standing.FAILED
        if not self.entry.is_ready:
            return Standing.COMPILING
        if self._slot is None:
            return Standing.READY
        return _TOLD[self._verdict] if self._asked == self._answered else Standing.ASKED

    def begin(self) -> None:
        """Have its grammar compiled, if it is not."""
        self._host.join(self)

    def close(self) -> None:
        """It is not wanted any more."""
        self._host.leave(self)

    def catch_up(self, tokens: list[int]) -> None:
        """Begin, or begin anew, with all tokens of the text so far; nothing, if they are known."""
        process = self.entry.process
        is_known = self._slot is not None and self.num_tokens == len(tokens)
        if is_known or self.error is not None or process is None or not self.entry.is_ready:
            return
        self.release_slot()
        question = self._asked + 1
        slot = process.start(self, tokens, question)
        self._asked, self._slot = question, slot
        self.num_tokens = len(tokens)  # last, here and below: whatever is interrupted is caught up with

    def accept(self, token: int) -> None:
        """Go on behind this token: asks, and does not wait."""
        if self._slot is not None and self.entry.process is not None:
            question = self._asked + 1
            self.entry.process.accept(self, self._slot, token, question)
            self._asked = question
        self.num_tokens += 1

    def told(self, question: int, verdict: Verdict) -> None:
        """What its process says to a question; to all but the last one it is of no interest any more."""
        self.entry.num_deaths = 0
        if question == self._asked:
            self._answered, self._verdict = question, verdict

    def fill(self, mask: Mask) -> None:
        """Write which tokens may come next into a contiguous mask; where the text follows its grammar."""
        assert self.standing is Standing.FOLLOWS
        assert self.entry.process is not None
        mask[:] = self.entry.process.memory.masks[self._slot]

    def release_slot(self) -> None:
        """Its process need not know it any more."""
        if self._slot is not None and self.entry.process is not None:
            self.entry.process.free(self._slot)
        self._slot = None

    def forget_process(self) -> None:
        """Its process is gone: it has to begin anew."""
        self._slot = None

    def fail(self, error: str, *, is_at_fault: bool = True) -> None:
        """It cannot be followed."""
        self.error = self.error or error
        self.is_at_fault = is_at_fault


class GrammarEntry:
    """One grammar, from the first text under it until it is no longer worth its memory."""

    def __init__(self, specification: bytes) -> None:
        self.specification = specification
        self.texts: set[FollowedText] = set()
        self.process: GrammarProcess | None = None
        """May be a new one every time; None while it is in the queue."""
        self.num_deaths = 0
        """How often its process ended in a row without an answer in between."""
        self.num_culprits = 0
        """Texts that its process died of."""

    @property
    def is_ready(self) -> bool:
        """Whether its process has compiled it."""
        return self.process is not None and self.process.outcome is not None

    @property
    def culprit(self) -> FollowedText | None:
        """Whose text its process was at work on."""
        found = None if self.process is None else self.process.culprit
        return next((text for text in self.texts if text is found), None)

    @property
    def num_bytes(self) -> int:
        """Memory of its process."""
        outcome = None if self.process is None else self.process.outcome
        return int((outcome or {}).get("bytes", 0))

    def drop_process(self) -> None:
        """Kill its process, if it has one; its texts have to begin anew."""
        if self.process is not None:
            self.process.kill()
            self.process = None
        for text in self.texts:
            text.forget_process()
