"""Hosts of grammars over a small vocabulary, and texts driven to their end."""

import time

import numpy as np

from ostinato.grammars.followed_text import FollowedText, Standing
from ostinato.grammars.host import GrammarHost
from ostinato.grammars.limits import GrammarLimits
from ostinato.grammars.nursery import pack_vocabulary
from ostinato.text.grammar import mask_words
from ostinato.text.structured import StructuredOutputs

END = 3
VOCABULARY = [b"" if byte == END else bytes([byte]) for byte in range(256)] + [b"ab", b'{"', b'": ', b"01"]
UNSETTLED = (Standing.COMPILING, Standing.READY, Standing.ASKED)


def make_host(**limits: float) -> GrammarHost:
    """Over `VOCABULARY`."""
    size = len(VOCABULARY)
    return GrammarHost(lambda: pack_vocabulary(VOCABULARY, size, [END]), size, GrammarLimits(**limits))  # type: ignore[arg-type]


class Writer:
    """Writes a text under a grammar, drawing from what may come next."""

    def __init__(self, host: GrammarHost, wanted: StructuredOutputs, seed: int = 0, tenant: str = "") -> None:
        self.host = host
        self.text: FollowedText = host.text(wanted, tenant)
        self.text.begin()
        self.tokens: list[int] = []
        self._chance = np.random.default_rng(seed)

    def settle(self, seconds: float = 20) -> Standing:
        """Until it is known where the text stands."""
        end = time.monotonic() + seconds
        while self.text.standing in UNSETTLED:
            assert time.monotonic() < end, f"it stays {self.text.standing}"
            if self.text.standing is Standing.READY:
                self.text.catch_up(self.tokens)
                self.host.settle([self.text])
            else:
                self.host.attend(0.01)
        return self.text.standing

    def allowed(self) -> list[int]:
        """Tokens that may come next."""
        mask = np.zeros(mask_words(len(VOCABULARY)), dtype=np.int32)
        self.text.fill(mask)
        found: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        return found

    def write(self, most: int) -> Standing:
        """So many tokens, or fewer if the text ends."""
        end = time.monotonic() + 30
        while self.settle() is Standing.FOLLOWS and len(self.tokens) < most and time.monotonic() < end:
            self.put(int(self._chance.choice(self.allowed())))
        return self.text.standing

    def put(self, token: int) -> None:
        """Go on with this token."""
        self.tokens.append(token)
        self.text.accept(token)
        self.host.settle([self.text])

    def written(self) -> bytes:
        """The text so far."""
        return b"".join(VOCABULARY[token] for token in self.tokens)
