"""Log probabilities in the two forms of the API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ostinato.text.detokenizer import Detokenizer
from ostinato.text.tokenizer import Tokenizer

from ..wire.messages import TokenLogprobs
from .responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class TokenTexts(dict[int, str]):
    """The text of each token by itself, worked out when first asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        self[token] = text = self.tokenizer.token_text(token)
        return text


class TokenNames(TokenTexts):
    """Ids instead of texts, as vLLM writes them: not every token is a text of its own."""

    def __missing__(self, token: int) -> str:
        self[token] = name = f"token_id:{token}"
        return name


def chat_logprobs(texts: TokenTexts, entries: Sequence[TokenLogprobs], top: int) -> ChatLogprobs:
    """For `/v1/chat/completions`: the sampled token of each entry and its `top` likeliest rivals; -1: all."""
    raw = texts.tokenizer.bytes_per_token

    def one(token: int, logprob: float) -> TopLogprob:
        return TopLogprob(texts[token], max(logprob, LOWEST), list(raw[token]))

    content = []
    for entry in entries:
        came = one(*entry[0][:2])
        best = [one(token, logprob) for token, logprob, rank in entry if _is_among(rank, top)]
        best.sort(key=lambda each: -each.logprob)
        content.append(TokenLogprob(came.token, came.logprob, came.bytes, best))
    return ChatLogprobs(content)


def _is_among(rank: int | None, top: int) -> bool:
    return top < 0 or (rank is not None and rank <= top)


def prompt_logprobs(texts: TokenTexts, length: int, found: Mapping[int, TokenLogprobs]) -> PromptLogprobs:
    """As vLLM gives them: for each token of a prompt of this length, which ones could have been there."""

    def at(position: int) -> dict[int, PromptLogprob] | None:
        if position not in found:
            return None
        return {
            token: PromptLogprob(max(logprob, LOWEST), rank, texts[token])
            for token, logprob, rank in found[position]
        }

    return [at(position) for position in range(length)]


class CompletionLogprobsBuilder:
    """For `/v1/completions`: lists that go on from chunk to chunk, offsets counted from the first text.

    A token begins behind the whole characters before it: those that share one have the same offset.
    """

    def __init__(self, shown: TokenTexts, top: int, answer: Detokenizer) -> None:
        """`shown`: what tokens are called; `answer` makes the text of the sampled ones."""
        self._shown = shown
        self._top = top
        self._answer = answer
        self._offset = 0

    def add_prompt(
        self, into: CompletionLogprobs, echo: str, prompt_ids: Sequence[int], found: dict[int, TokenLogprobs]
    ) -> None:
        """The prompt, echoed as this text; its first token has no probability."""
        tokenizer = self._shown.tokenizer
        # What the tokenizer puts around a text is not echoed.
        before = max(0, tokenizer.decode(prompt_ids, skip_special_tokens=False).find(echo))
        texts, end = tokenizer.detokenizer(skip_special_tokens=False), 0
        for position, token in enumerate(prompt_ids):
            self._offset = min(max(0, end - before), len(echo))
            self._add(into, token, found.get(position))
            end += len(texts.push_one(token))
        self._offset = len(echo)

    def add(self, into: CompletionLogprobs, entries: Sequence[TokenLogprobs]) -> None:
        """Sampled tokens."""
        for entry in entries:
            self._add(into, entry[0][0], entry)
            self._offset += len(self._answer.push_one(entry[0][0]))

    def _add(self, into: CompletionLogprobs, token: int, entry: TokenLogprobs | None) -> None:
        name = self._shown[token]
        into.tokens.append(name)
        into.text_offset.append(self._offset)
        own = None if entry is None else next(logprob for which, logprob, _ in entry if which == token)
        into.token_logprobs.append(None if own is None else max(own, LOWEST))
        if into.top_logprobs is None:
            return
        if entry is None or own is None:
            into.top_logprobs.append(None)
            return
        # As OpenAI does: the token that came is always among them, and no other stands for it that has the
        # same text, such as a part of another character.
        top = {name: max(own, LOWEST)}
        for which, logprob, rank in entry:
            if _is_among(rank, self._top):
                top.setdefault(self._shown[which], max(logprob, LOWEST))
        into.top_logprobs.append(top)
