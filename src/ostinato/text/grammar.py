"""Which tokens may come next so that a text stays inside a grammar. Through xgrammar."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import GrammarError
from .structured import StructuredOutputs

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

Mask = np.ndarray[Any, np.dtype[np.int32]]
"""One bit per token id, the lowest first; set: allowed."""


def mask_words(vocab_size: int) -> int:
    """32-bit words of a mask."""
    return -(-vocab_size // 32)


class GrammarCompiler:
    """Makes grammars for one tokenizer; the same one twice is compiled once."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: that of the model, which may have more ids than the tokenizer."""
        try:
            import xgrammar
        except ImportError as error:
            raise GrammarError(
                "structured outputs need xgrammar: pip install -e '.[server]' in Ostinato's folder"
            ) from error
        self._xgrammar = xgrammar
        size = min(tokenizer.vocab_size, vocab_size)
        special = tokenizer.special_ids
        # A special token is no text: with no bytes nothing can ask for it but the end.
        vocabulary = [b"" if token in special else tokenizer.bytes_per_token[token] for token in range(size)]
        info = xgrammar.TokenizerInfo(
            vocabulary,
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=vocab_size,
            stop_token_ids=[token for token in tokenizer.eos_token_ids if token < vocab_size],
        )
        self._compiler = xgrammar.GrammarCompiler(info)
        self._compiled = lru_cache(maxsize=128)(self._compile)

    def start(self, wanted: StructuredOutputs) -> Grammar:
        """A grammar at its beginning."""
        return Grammar(self._xgrammar.GrammarMatcher(self._compiled(wanted)))

    def _compile(self, wanted: StructuredOutputs) -> Any:
        compiler = self._compiler
        try:
            if wanted.json is not None:
                return compiler.compile_json_schema(str(wanted.json))
            if wanted.regex is not None:
                return compiler.compile_regex(wanted.regex)
            if wanted.grammar is not None:
                return compiler.compile_grammar(wanted.grammar)
            if wanted.structural_tag is not None:
                return compiler.compile_structural_tag(wanted.structural_tag)
            # Not any JSON value: callers of json_object expect an object.
            return compiler.compile_json_schema('{"type": "object"}', any_whitespace=True)
        except RuntimeError as error:
            raise GrammarError(f"this cannot be followed: {error}") from error


class Grammar:
    """How far one text has got in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def is_terminated(self) -> bool:
        """Whether the text is complete and its end was accepted."""
        return bool(self._matcher.is_terminated())

    def fill(self, mask: Mask) -> None:
        """Write which tokens may come next into a contiguous mask."""
        import torch

        self._matcher.fill_next_token_bitmask(torch.from_numpy(mask).unsqueeze(0), 0)

    def accept(self, token: int) -> bool:
        """Go on behind this token; False if it is not allowed here."""
        return bool(self._matcher.accept_token(token))
