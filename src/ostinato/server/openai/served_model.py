"""The model as the HTTP process knows it: its name, its limits and its tokenizer."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ostinato.text.chat_template import template_source
from ostinato.text.detokenizer import Detokenizer
from ostinato.text.errors import TokenizerError
from ostinato.text.messages import joined_parts, with_arguments_read
from ostinato.text.token_bound import most_bytes_per_token
from ostinato.text.tokenizer import Tokenizer

from ..config import TOOL_CALL_PARSERS, ServerConfig
from ..text_work.lanes import LanesFull, TextLanes
from ..text_work.work import Conversation, TextLimit, TextRefused, TextWork
from ..wire.messages import Ready
from .conversation import Message, Tool
from .draft_metrics import DraftMetrics
from .errors import ApiError, unavailable
from .logprobs import TokenNames, TokenTexts
from .tool_calls.formats import chat_template_of, kind_of_model

_NOTES = {"cache_control", "provider_specific_fields"}
"""Of messages and tools: nothing for templates."""
_RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ServedModel:
    """Turns what clients send into token ids that the engine accepts, or refuses it."""

    def __init__(self, name: str, ready: Ready, config: ServerConfig, tokenizer: Tokenizer | None) -> None:
        self.name = self.base_name = name
        self.ready = ready
        self.adapter: str | None = None
        """The adapter that a request has named, in a view of the model for it."""
        self.adapters = {each.name: each for each in ready.adapters}
        """All that are loaded."""
        self.lost_adapters: dict[str, str] = {}
        """Those that an engine before had and this one has not, and why."""
        self._adapter_param: str | None = None
        """The field that has named the adapter, in a view; None: the model's name."""
        self.draft_metrics = DraftMetrics(config.per_request_spec_decode_metrics, ready.most_drafts)
        """What answers tell about their drafts."""
        self.tokenizer = tokenizer
        self._token_texts = TokenTexts(tokenizer) if tokenizer is not None else None
        self.created = int(time.time())
        directory = Path(ready.tokenizer_directory)
        kind = TOOL_CALL_PARSERS[config.tool_call_parser]
        self.tool_call_kind = kind_of_model(directory) if kind == "auto" else kind
        self._special_tokens_are_text = config.content_special_tokens == "text"
        self._trusts_templates = config.trust_request_chat_template
        given = config.chat_template
        template = chat_template_of(directory) if given is None else template_source(given)
        self._shows_tools = not template or "tools" in template
        self.max_prompt_tokens = min(config.max_prompt_tokens or ready.max_model_len, ready.max_model_len)
        self._lanes: TextLanes | None = None
        if tokenizer is not None:
            replaced = None if given is None else template
            self._lanes = TextLanes(tokenizer, ready.tokenizer_directory, replaced)

    def close(self) -> None:
        """End what works for it."""
        if self._lanes is not None:
            self._lanes.close()

    @cached_property
    def _bytes_per_token(self) -> int | None:
        return most_bytes_per_token(self.need_tokenizer("prompt").backend)

    def _limit(self, answer: int) -> TextLimit:
        return TextLimit(self._longest_before(answer), self._bytes_per_token)

    def named(self, name: str | None) -> ServedModel:
        """The model as a request means it, perhaps with an adapter; 404 for one that is not served here."""
        if name is None or name == self.name:
            return self
        base, _, behind = name.rpartition(":")
        adapter = name if name in self.adapters else behind if base == self.name else None
        if adapter not in self.adapters:
            raise self._unknown(name)
        return self._with_adapter(adapter, name, None)

    def with_adapter(self, adapter: str | None, param: str) -> ServedModel:
        """The model with the adapter of this name; 400 if it is not loaded."""
        if adapter is None:
            return self
        if adapter not in self.adapters:
            raise self._not_loaded(adapter, param)
        return self._with_adapter(adapter, adapter, param)

    def without_its_adapter(self) -> ApiError:
        """For a request whose adapter was unloaded while it was on its way: what the next one is told."""
        assert self.adapter is not None
        param = self._adapter_param
        return self._unknown(self.name) if param is None else self._not_loaded(self.adapter, param)

    def _unknown(self, name: str) -> ApiError:
        behind = name.rpartition(":")[2]
        # Of a view, the list may still have the one that was just unloaded.
        others = [known for known in self.adapters if known != self.adapter]
        message = f"the model {name!r} does not exist; this server has {self.base_name!r}"
        message += "".join(f", {known!r}" for known in others)
        message += self._why_lost(name if name in self.lost_adapters else behind)
        return ApiError(404, message, param="model", code="model_not_found")

    def _not_loaded(self, adapter: str, param: str) -> ApiError:
        message = f"{param}: the adapter {adapter!r} is not loaded{self._why_lost(adapter)}"
        return ApiError(400, message, param=param)

    def _why_lost(self, adapter: str) -> str:
        why = self.lost_adapters.get(adapter)
        if why is None:
            return ""
        return f"; it could not be loaded again when the engine was started again: {why}"

    def _with_adapter(self, adapter: str, name: str, param: str | None) -> ServedModel:
        view = copy.copy(self)
        view.name, view.adapter, view._adapter_param = name, adapter, param
        return view

    def need_tokenizer(self, param: str) -> Tokenizer:
        """The tokenizer; 400 where the model has none."""
        if self.tokenizer is None:
            raise ApiError(400, f"this model has no tokenizer: {param} needs one", param=param)
        return self.tokenizer

    def need_token_texts(self) -> TokenTexts:
        """The texts of single tokens, for logprobs; 400 where the model has no tokenizer."""
        self.need_tokenizer("logprobs")
        assert self._token_texts is not None
        return self._token_texts

    def shown_tokens(self, as_ids: bool | None) -> TokenTexts:
        """What logprobs call tokens: their texts, or ids."""
        texts = self.need_token_texts()
        return TokenNames(texts.tokenizer) if as_ids else texts

    def detokenizer(self, prompt_ids: list[int], *, skip_special_tokens: bool) -> Detokenizer | None:
        """For one completion of a prompt; None where the model has no tokenizer."""
        if self.tokenizer is None:
            return None
        return self.tokenizer.detokenizer(skip_special_tokens=skip_special_tokens, behind=prompt_ids)

    async def encode(
        self,
        text: str,
        param: str,
        *,
        add_special_tokens: bool = True,
        is_prompt: bool = True,
        answer: int = 1,
        other: str | None = None,
    ) -> list[int]:
        """Token ids of a text, or of two as the tokenizer joins them; one that is no prompt, or is cut to
        one, may be longer than any prompt before an answer of so many tokens."""
        self.need_tokenizer(param)
        for each in (text, other or ""):
            check_unicode(each, param)
        limit = self._limit(answer) if is_prompt else None
        return await self._ids(TextWork(text, add_special_tokens, limit, param, other))

    async def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        *,
        add_generation_prompt: bool | None = None,
        continues: bool = False,
        variables: dict[str, Any] | None = None,
        reasoning_effort: str | None = None,
        template: str | None = None,
        is_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation as the model's chat template writes it, or one of the client's.

        `continues`: the last message is not at its end, and what follows belongs to it.
        """
        self.need_tokenizer("messages")
        if template is not None:
            template = self._trusted(template)
        given = dict(variables or {})
        if clashing := sorted(_RESERVED_VARIABLES & given.keys()):
            message = f"chat_template_kwargs must not contain {clashing[0]}: it has a field of its own"
            raise ApiError(400, message, param="chat_template_kwargs")
        if tools and not (self._shows_tools if template is None else "tools" in template):
            message = "tools: this model's chat template has no place for tools, the model would not see them"
            raise ApiError(400, message, param="tools")
        if reasoning_effort is not None:
            given.setdefault("reasoning_effort", reasoning_effort)
        written = [_as_template_message(message) for message in messages]
        if continues and add_generation_prompt:
            message = "continue_final_message: with add_generation_prompt another message would begin"
            raise ApiError(400, message, param="continue_final_message")
        conversation = Conversation(
            written,
            [tool.model_dump(exclude_none=True, exclude=_NOTES) for tool in tools] if tools else None,
            add_generation_prompt is not False and not continues,
            given,
            continues,
            template,
            self._special_tokens_are_text,
        )
        limit = self._limit(1) if is_prompt else None
        return await self._ids(TextWork(conversation, False, limit, "messages"))

    async def _ids(self, work: TextWork) -> list[int]:
        assert self._lanes is not None
        try:
            return await self._lanes.ids(work)
        except TextRefused as error:
            raise ApiError(400, str(error), param=error.field or work.name, code=error.code) from error
        except LanesFull as error:
            raise unavailable(str(error)) from error

    def _trusted(self, template: str) -> str:
        """A client's template; 400 unless the server was told to trust clients with it. It is compiled where
        it is run, in a process of its own."""
        if not self._trusts_templates:
            message = "chat_template: templates of clients are not run by this server; start it with "
            message += "--trust-request-chat-template, or set variables with chat_template_kwargs"
            raise ApiError(400, message, param="chat_template")
        check_unicode(template, "chat_template")
        return template

    def cut(self, ids: list[int], kept: int | None, answer: int) -> list[int]:
        """The last `kept` tokens of a prompt; all for None, and for -1 those that leave room for an answer of
        so many."""
        if kept is None:
            return ids
        if kept < 0:
            kept = max(1, self._longest_before(answer))
        return ids[-kept:] if kept else []

    def _longest_before(self, answer: int) -> int:
        """The most tokens of a prompt before an answer of so many."""
        return min(self.max_prompt_tokens, self.ready.max_model_len - answer)

    def checked_prompt(self, ids: list[int], param: str, answer: int = 1) -> list[int]:
        """The prompt if the model can take it; 400 if it is empty, too long or not of its vocabulary.

        `answer`: the fewest tokens that come behind it; none behind one that is only read.
        """
        if not ids:
            raise ApiError(400, f"{param} has no tokens: at least one is needed", param=param)
        if len(ids) > (longest := self._longest_before(answer)):
            raise ApiError(
                400,
                f"{param} has {len(ids)} tokens, at most {longest} are accepted "
                f"(the model's context length is {self.ready.max_model_len})",
                param=param,
                code="context_length_exceeded",
            )
        if max(ids) >= self.ready.vocab_size:
            message = f"token id {max(ids)} is outside the model's vocabulary of {self.ready.vocab_size}"
            raise ApiError(400, message, param=param)
        return ids

    def checked_max_tokens(self, asked: int | None, prompt_tokens: int, param: str) -> int:
        """How many tokens a completion may have; 400 where more are asked for than fit."""
        room = self.ready.max_model_len - prompt_tokens
        if asked is None:
            return min(room, int(self.ready.default_sampling.get("max_tokens", room)))
        if asked > room:
            raise ApiError(
                400,
                f"the model's context length is {self.ready.max_model_len} tokens: behind a prompt of "
                f"{prompt_tokens} there is room for {room}, not for {asked}",
                param=param,
                code="context_length_exceeded",
            )
        return asked


def check_unicode(text: str, param: str) -> None:
    """400 for half a surrogate pair, which JSON can carry and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ApiError(400, f"{param} is not valid Unicode: {error.reason}", param=param) from None


def _as_template_message(message: Message) -> dict[str, Any]:
    """A message as templates are written against: content a text, arguments an object."""
    given = message.model_dump(exclude_none=True, exclude=_NOTES)
    if reasoning := given.pop("reasoning", None):
        given.setdefault("reasoning_content", reasoning)
    if isinstance(message.content, list):
        given["content"] = joined_parts(part.text for part in message.content)
    if message.role == "developer":
        given["role"] = "system"
    for call in given.get("tool_calls", ()):
        call.pop("index", None)
    try:
        return with_arguments_read(given)
    except TokenizerError as error:
        raise ApiError(400, str(error), param="messages") from None
