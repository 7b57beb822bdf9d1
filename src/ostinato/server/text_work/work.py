"""A piece of work on text, and how it is done, in whichever process."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ostinato.text.content_tokens import ClientTexts
from ostinato.text.errors import TokenizerError
from ostinato.text.tokenizer import Tokenizer

MOST_TOKENS = 2**20
"""Of any text: lists of more would hold up whoever sends them on."""


class TextRefused(Exception):
    """The text cannot be taken; `code` as the API words it, `field` where another one is at fault."""

    def __init__(self, message: str, code: str | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.field = field


class Conversation(msgspec.Struct, frozen=True):
    """What a chat template is given."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    variables: dict[str, Any]
    continues: bool
    """Whether what follows belongs to the last message, which is not at its end."""
    template: str | None = None
    """A client's, instead of the model's."""
    special_tokens_are_text: bool = False
    """Special tokens in what the client wrote are text."""


class TextLimit(msgspec.Struct, frozen=True):
    """What is too long."""

    tokens: int
    bytes_per_token: int | None
    """The most; None where that is not known."""


class TextWork(msgspec.Struct, frozen=True):
    """A text, two as the tokenizer joins them, or a conversation, whose token ids are wanted."""

    given: str | Conversation
    add_special_tokens: bool
    limit: TextLimit | None
    name: str
    """What the client calls it."""
    other: str | None = None
    """The second of two texts."""


def do_text_work(work: TextWork, tokenizer: Tokenizer) -> list[int]:
    """The token ids."""
    given = work.given
    if isinstance(given, Conversation) and given.template is not None:
        tokenizer = tokenizer.with_chat_template(given.template)
    text = given if isinstance(given, str) else _rendered(given, tokenizer)
    check_length(text, work.limit, work.name)
    both = text if work.other is None else (text, work.other)
    # In a batch of one: alone it would keep all threads of the process waiting, in a batch it does not.
    [encoding] = tokenizer.backend.encode_batch_fast([both], add_special_tokens=work.add_special_tokens)
    if len(encoding) > MOST_TOKENS:
        message = f"{work.name} has {len(encoding):,} tokens, at most {MOST_TOKENS:,} are told"
        raise TextRefused(message, "context_length_exceeded")
    ids: list[int] = encoding.ids
    if isinstance(given, Conversation) and given.special_tokens_are_text:
        return _with_special_tokens_as_text(given, text, ids, tokenizer)
    return ids


def _with_special_tokens_as_text(
    given: Conversation, text: str, ids: list[int], tokenizer: Tokenizer
) -> list[int]:
    texts = ClientTexts(given.messages, given.tools, given.variables)
    try:
        template = tokenizer.template_source(given.tools)
        return tokenizer.content_tokens.ids(
            text, ids, texts, lambda changed: _written(given, changed, tokenizer), template
        )
    except TokenizerError as error:
        raise TextRefused(str(error), "special_token_in_text") from error


def check_length(text: str, limit: TextLimit | None, name: str) -> None:
    """Refuse what has too many tokens whatever they are."""
    if limit is None or limit.bytes_per_token is None:
        return
    if 4 * len(text) <= limit.tokens * limit.bytes_per_token:
        return
    size = len(text.encode(errors="surrogatepass"))
    fewest = math.ceil(size / limit.bytes_per_token)
    if fewest > limit.tokens:
        raise TextRefused(
            f"{name} has {size:,} bytes, which are at least {fewest:,} tokens: "
            f"at most {limit.tokens:,} tokens are accepted",
            "context_length_exceeded",
        )


def _rendered(given: Conversation, tokenizer: Tokenizer) -> str:
    field = None if given.template is None else "chat_template"
    try:
        text = _written(given, ClientTexts(given.messages, given.tools, given.variables), tokenizer)
        text.encode()
    except UnicodeEncodeError as error:
        raise TextRefused(f"the text is not valid Unicode: {error.reason}", field=field) from error
    except (TokenizerError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        if str(error).startswith("continue_final_message:"):
            field = "continue_final_message"
        raise TextRefused(str(error), field=field) from error
    return text


def _written(given: Conversation, texts: ClientTexts, tokenizer: Tokenizer) -> str:
    return tokenizer.apply_chat_template(
        texts.messages,
        tools=texts.tools,
        add_generation_prompt=given.add_generation_prompt,
        continue_final_message=given.continues,
        **texts.variables,
    )
