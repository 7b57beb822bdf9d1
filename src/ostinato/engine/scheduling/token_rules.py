"""Which tokens a request's own lists allow: allowed_token_ids, bad_words, no end before min_tokens.

What never changes is one mask, set when the request gets its row. A bad word of several tokens forbids its
last one after the others, so the host has to see every token first, as for a grammar: such a request waits
(Note [Grammars] in core.py). If there is a grammar too, both must allow a token.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from ostinato.text.grammar import Mask, mask_words

from ..parameters.sampling_params import RequestError, SamplingParams

NOTHING_LEFT = (
    "the sampling parameters leave no token that is allowed: structured_outputs, allowed_token_ids, "
    "bad_words, logits_processors and min_tokens contradict each other here"
)


def rules_of(
    params: SamplingParams,
    eos_token_ids: Iterable[int],
    vocab_size: int,
    *,
    has_grammar: bool,
    is_processed: bool = False,
) -> TokenRules | None:
    """The rules from a request's lists; None if it has none. Raises RequestError if they allow nothing.

    `is_processed`: whether callers' functions change its logits.
    """
    words = params.bad_words or ()
    has_lists = params.allowed_token_ids is not None or bool(words)
    is_held_off = has_grammar and params.min_tokens > 0
    if not has_lists and not is_held_off and not is_processed:
        return None
    for word in words:
        if isinstance(word, str):
            raise RequestError("bad_words as text need a tokenizer, and this model has none: give token ids")
    _check_known("bad_words", [token for word in words for token in word], vocab_size)  # type: ignore[misc]
    _check_known("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    # When a grammar's text is complete, the end-of-sequence token ends it, ignored or not.
    ends = () if params.ignore_eos and not has_grammar else eos_token_ids
    return TokenRules(params, ends, vocab_size, is_processed)


class SharedRules:
    """Keeps the rules that were made last: completions of one prompt have the same lists, and share them."""

    def __init__(self) -> None:
        self._made_of: tuple[object, ...] = ()
        self._others: tuple[object, ...] = ()
        self._rules: TokenRules | None = None

    def of(
        self,
        params: SamplingParams,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        *,
        has_grammar: bool,
        is_processed: bool = False,
    ) -> TokenRules | None:
        """Returns what `rules_of` returns."""
        lists = (params.bad_words, params.allowed_token_ids, params.stop_token_ids, eos_token_ids)
        others = (vocab_size, params.min_tokens, params.ignore_eos, has_grammar, is_processed)
        is_same = others == self._others and all(map(operator.is_, lists, self._made_of))
        if not is_same or not self._made_of:
            self._rules = rules_of(
                params, eos_token_ids, vocab_size, has_grammar=has_grammar, is_processed=is_processed
            )
            self._made_of, self._others = lists, others
        return self._rules


class TokenRules:
    """The token rules of one request."""

    def __init__(
        self, params: SamplingParams, eos_token_ids: Iterable[int], vocab_size: int, is_processed: bool
    ) -> None:
        """`eos_token_ids`: those that end it. Raises RequestError if they leave nothing at the beginning."""
        words: list[list[int]] = [list(word) for word in params.bad_words or ()]  # type: ignore[arg-type]
        singles = [word[0] for word in words if len(word) == 1]
        base = _mask_of(params.allowed_token_ids, vocab_size)
        self.lasting = without(base, singles)
        """Tokens allowed regardless of earlier ones."""
        self._behind: defaultdict[int, list[list[int]]] = defaultdict(list)
        """Words of several tokens, by the token before their last."""
        for word in words:
            if len(word) > 1:
                self._behind[word[-2]].append(word)
        self.num_looked_at = max((len(word) - 1 for word in words), default=0) or 1
        """How many of the latest tokens matter."""
        self.follows_tokens = bool(self._behind) or is_processed
        """Whether the allowed tokens depend on earlier ones."""
        ends = {*eos_token_ids, *(params.stop_token_ids or ())} if params.min_tokens else set()
        self._ends = [token for token in ends if token < vocab_size]
        self._min_tokens = params.min_tokens
        if not self.next(()).any():
            at_fault = "bad_words" if params.allowed_token_ids is None else "allowed_token_ids"
            raise RequestError(f"{at_fault}: {NOTHING_LEFT}")

    def next(self, last: Sequence[int], length: int = 0) -> Mask:
        """The tokens allowed after these latest of `length` tokens."""
        forbidden = list(self._ends) if length < self._min_tokens else []
        for word in self._behind.get(last[-1], ()) if len(last) else ():
            before = len(word) - 1
            if list(last[-before:]) == word[:-1]:
                forbidden.append(word[-1])
        return without(self.lasting, forbidden)


def without(mask: Mask, tokens: Iterable[int]) -> Mask:
    """A mask without these tokens; the same object if there are none."""
    listed = list(tokens)
    if not listed:
        return mask
    changed = mask.copy()
    octets = changed.view(np.uint8)
    for token in listed:
        octets[token >> 3] &= ~(1 << (token & 7)) & 255
    return changed


def _mask_of(allowed: Sequence[int] | None, vocab_size: int) -> Mask:
    if allowed is None:
        return _everything(vocab_size)
    bits = np.zeros(32 * mask_words(vocab_size), dtype=bool)
    bits[list(allowed)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


@lru_cache(maxsize=2)
def _everything(vocab_size: int) -> Mask:
    """All tokens of the vocabulary, and no bit after them."""
    return _mask_of(range(vocab_size), vocab_size)


def _check_known(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    if tokens and max(tokens) >= vocab_size:
        raise RequestError(
            f"{name}: token {max(tokens)} is outside the vocabulary, which ends at {vocab_size - 1}"
        )
