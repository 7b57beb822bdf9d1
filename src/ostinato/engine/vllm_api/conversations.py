"""Turns conversations of `LLM.chat` into prompts: the options for how a chat template writes them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.text.chat_template import template_source
from ostinato.text.errors import TokenizerError
from ostinato.text.messages import joined_parts, with_arguments_read

from ..parameters.sampling_params import RequestError
from ..text_engine import TextEngine

logger = logging.getLogger("ostinato.engine")

Messages = Sequence[Mapping[str, Any]]

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "template"})
_FORMATS = ("auto", "string", "openai")


@dataclass(frozen=True)
class ChatOptions:
    """How conversations are written; see `LLM.chat`."""

    chat_template: str | None = None
    chat_template_content_format: str = "auto"
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.chat_template_content_format not in _FORMATS:
            known = ", ".join(_FORMATS)
            given = self.chat_template_content_format
            raise RequestError(f"chat_template_content_format must be one of {known}, not {given!r}")
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message needs add_generation_prompt=False: otherwise another message begins"
            )
        if self.tools is not None and not (
            isinstance(self.tools, list | tuple) and all(isinstance(tool, Mapping) for tool in self.tools)
        ):
            raise RequestError(f"tools must be a list of objects, not {self.tools!r}"[:200])
        if clashing := sorted(_RESERVED & set(self.chat_template_kwargs or ())):
            raise RequestError(f"chat_template_kwargs must not contain {clashing[0]}: it has its own keyword")

    def prepared(self, engine: TextEngine) -> ConversationWriter:
        """A writer with these options. Raises RequestError for options that cannot work with any
        conversation."""
        tokenizer = engine.tokenizer
        variables = dict(self.chat_template_kwargs or {})
        if tokenizer is None:
            raise RequestError("this model has no tokenizer: give {'prompt_token_ids': [...]} to generate")
        try:
            template = None if self.chat_template is None else template_source(self.chat_template)
            unused = tokenizer.unused_variables(variables, template=template)
        except TokenizerError as error:
            raise RequestError(str(error)) from error
        for name in unused:
            logger.warning("chat_template_kwargs: the chat template does not use %s", name)
        return ConversationWriter(engine, self, template, variables)


@dataclass(frozen=True)
class ConversationWriter:
    """Writes conversations, all with the same options."""

    _engine: TextEngine
    _options: ChatOptions
    _template: str | None
    _variables: Mapping[str, Any]

    def prompt(self, messages: Messages) -> dict[str, Any]:
        """The text and the token ids. Raises RequestError if the template refuses the messages."""
        options = self._options
        return self._engine.prompts.chat(
            [self._message(message) for message in messages],
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            tools=options.tools or None,
            template=self._template,
            **self._variables,
        )

    def _message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Templates expect contents to be texts: parts are joined, unless the format says otherwise."""
        try:
            read = with_arguments_read(message)
        except TokenizerError as error:
            raise RequestError(str(error)) from error
        content = read["content"]
        if not isinstance(content, list | tuple):
            return read
        for part in content:
            if not isinstance(part, Mapping) or part.get("type", "text") != "text" or "text" not in part:
                kind = part.get("type") if isinstance(part, Mapping) else part
                raise RequestError(f"a part of type {kind!r} is not supported, only text")
        if self._options.chat_template_content_format == "openai":
            return read
        return read | {"content": joined_parts(part["text"] for part in content)}


def listed_conversations(messages: Any) -> tuple[list[Messages], bool]:
    """The conversations as a list, and whether there was a single one. Raises RequestError for other
    types."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    if not is_list:
        raise RequestError(
            f"messages must be a list of objects with role and content, not {messages!r}"[:200]
        )
    single = not messages or isinstance(messages[0], Mapping)
    conversations: list[Any] = [messages] if single else list(messages)
    for at, conversation in enumerate(conversations):
        where = "messages" if single else f"messages[{at}]"
        if isinstance(conversation, str | bytes) or not isinstance(conversation, Sequence):
            raise RequestError(f"{where} is {conversation!r}, not a list of messages"[:200])
        if not conversation:
            raise RequestError(f"{where} is empty: there is nothing to answer")
        for message in conversation:
            if not isinstance(message, Mapping) or "role" not in message:
                raise RequestError(
                    f"{where}: a message must be an object with role and content, not {message!r}"[:200]
                )
    return conversations, single
