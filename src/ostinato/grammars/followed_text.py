"""A text under a grammar, and a grammar with all its texts, as the engine sees them."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from ostinato.text.grammar import Mask

from .layout import Verdict
from .process import GrammarProcess


class Standing(Enum):
    """The state of a text."""

    COMPILING = "compiling"
    """Its grammar is being compiled, or must be compiled again."""
    READY = "ready"
    """Its grammar is compiled, and the text can begin, or continue from where it was: `catch_up`."""
    ASKED = "asked"
    """The question what may come next is not answered yet."""
    FOLLOWS = "follows"
    """`fill` says what may come next."""
    COMPLETE = "complete"
    """It has ended as the grammar requires."""
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
    """Manages the grammars that are in use."""

    def join(self, text: FollowedText) -> None:
        """A text needs its grammar."""

    def leave(self, text: FollowedText) -> None:
        """A text no longer needs its grammar."""


class FollowedText:
    """Created by `GrammarHost.text`; call `begin` when it is needed, and `close` when it no longer is."""

    def __init__(self, host: Entries, entry: GrammarEntry, tenant: str = "") -> None:
        self._host = host
        self.tenant = tenant
        """Whose text it is; grammars are compiled by turns of tenants."""
        self.entry = entry
        self._slot: int | None = None
        self._asked = self._answered = 0
        self._verdict = Verdict.FOLLOWS
        self.is_parked = False
        """Whether its request waits for it: `GrammarHost.attend` reports changes."""
        self.num_tokens = 0
        """How many tokens its grammar has seen."""
        self.strikes = 0
        """How often the process of its grammar died or hung because of it."""
        self.error: str | None = None
        """Why it cannot be followed."""
        self.is_at_fault = True
        """Whether the cause is the request itself."""

    @property
    def standing(self) -> Standing:
        """Its state; `GrammarHost.attend` and `settle` advance it."""
        if self.error is not None:
            return Standing.FAILED
        if not self.entry.is_ready:
            return Standing.COMPILING
        if self._slot is None:
            return Standing.READY
        return _TOLD[self._verdict] if self._asked == self._answered else Standing.ASKED

    def begin(self) -> None:
        """Have its grammar compiled, if it is not yet."""
        self._host.join(self)

    def close(self) -> None:
        """Call when it is no longer needed."""
        self._host.leave(self)

    def catch_up(self, tokens: list[int]) -> None:
        """Begin, or begin again, with all tokens of the text so far; does nothing if they are already
        known."""
        process = self.entry.process
        is_known = self._slot is not None and self.num_tokens == len(tokens)
        if is_known or self.error is not None or process is None or not self.entry.is_ready:
            return
        self.release_slot()
        question = self._asked + 1
        slot = process.start(self, tokens, question)
        self._asked, self._slot = question, slot
        self.num_tokens = len(tokens)  # last, here and below: after an interrupt, `catch_up` repeats it

    def accept(self, token: int) -> None:
        """Continue with this token: asks, but does not wait."""
        if self._slot is not None and self.entry.process is not None:
            question = self._asked + 1
            self.entry.process.accept(self, self._slot, token, question)
            self._asked = question
        self.num_tokens += 1

    def told(self, question: int, verdict: Verdict) -> None:
        """Note the answer of its process to a question; only the answer to the last question matters."""
        self.entry.num_deaths = 0
        if question == self._asked:
            self._answered, self._verdict = question, verdict

    def fill(self, mask: Mask) -> None:
        """Write which tokens may come next into a contiguous mask; only in state FOLLOWS."""
        assert self.standing is Standing.FOLLOWS
        assert self.entry.process is not None
        mask[:] = self.entry.process.memory.masks[self._slot]

    def release_slot(self) -> None:
        """Let its process forget it."""
        if self._slot is not None and self.entry.process is not None:
            self.entry.process.free(self._slot)
        self._slot = None

    def forget_process(self) -> None:
        """Its process is gone: it must begin again."""
        self._slot = None

    def fail(self, error: str, *, is_at_fault: bool = True) -> None:
        """Mark it as impossible to follow."""
        self.error = self.error or error
        self.is_at_fault = is_at_fault


class GrammarEntry:
    """One grammar, from its first text until it is no longer worth its memory."""

    def __init__(self, specification: bytes) -> None:
        self.specification = specification
        self.texts: set[FollowedText] = set()
        self.process: GrammarProcess | None = None
        """A new process may take its place at any time; None while it is queued."""
        self.num_deaths = 0
        """How often in a row its process ended without an answer in between."""
        self.num_culprits = 0
        """Number of texts that its process died of."""

    @property
    def tenants(self) -> set[str]:
        """Those who need it."""
        return {text.tenant for text in self.texts}

    @property
    def is_ready(self) -> bool:
        """Whether its process has compiled it."""
        return self.process is not None and self.process.outcome is not None

    @property
    def culprit(self) -> FollowedText | None:
        """The text that its process was working on."""
        found = None if self.process is None else self.process.culprit
        return next((text for text in self.texts if text is found), None)

    @property
    def num_bytes(self) -> int:
        """Memory of its process."""
        outcome = None if self.process is None else self.process.outcome
        return int((outcome or {}).get("bytes", 0))

    def drop_process(self) -> None:
        """Kill its process, if it has one; its texts must begin again."""
        if self.process is not None:
            self.process.kill()
            self.process = None
        for text in self.texts:
            text.forget_process()
