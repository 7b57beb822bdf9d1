"""Token ids to text as they arrive."""

import codecs
from collections.abc import Collection, Iterable

from .token_bytes import TokenBytes


class Detokenizer:
    """The text of one growing list of token ids, in pieces that always end at a character's end.

    The pieces of `push` and the last one of `finish` add up to `Tokenizer.decode` of all the ids; after a
    prompt, to what the ids add to its text.
    """

    def __init__(
        self, bytes_per_token: TokenBytes, skipped: Collection[int], behind: Iterable[int] = ()
    ) -> None:
        """`skipped` ids have no text. Created by `Tokenizer.detokenizer`."""
        self._bytes, self._skipped = bytes_per_token, skipped
        # A space between prompt and answer is not at the start of a text.
        self._strip_first_space = bytes_per_token.strip_first_space and not any(
            bytes_per_token[int(i)] for i in behind if i not in skipped
        )
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these ids complete; ids outside the vocabulary have none."""
        table, skipped = self._bytes, self._skipped
        return self._decoded(b"".join([table[i] for i in token_ids if i not in skipped]))

    def push_one(self, token_id: int) -> str:
        """`push` for one id."""
        return "" if token_id in self._skipped else self._decoded(self._bytes[token_id])

    def finish(self) -> str:
        """The rest: a replacement character if the ids ended inside a character."""
        return self._decoder.decode(b"", final=True)

    def _decoded(self, new: bytes) -> str:
        if self._strip_first_space and new:
            self._strip_first_space = False
            new = new.removeprefix(b" ")
        return self._decoder.decode(new)
