"""Text to token ids and back, from the tokenizer files of a model directory.

A `tokenizer.json` needs only `tokenizers`; transformers, which takes seconds to import, is used only to
convert older formats.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from .chat_template import ChatTemplate
from .content_tokens import ContentTokens
from .detokenizer import Detokenizer
from .errors import TokenizerError
from .json_file import read_json
from .named_tokens import add_named_tokens, named_tokens
from .token_bytes import TokenBytes


class Tokenizer:
    """A model's tokenizer with its special tokens, end-of-text ids and chat template."""

    def __init__(
        self,
        backend: Any,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Iterable[int],
        templates: Mapping[str, str],
    ) -> None:
        """`backend` is a `tokenizers.Tokenizer`; `templates` holds chat template sources by name."""
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self._templates = {
            name: ChatTemplate(source, self.special_tokens) for name, source in templates.items()
        }

    @staticmethod
    def from_directory(directory: str | Path) -> "Tokenizer":
        """Load the tokenizer of a model directory."""
        folder = Path(directory)
        config = read_json(folder / "tokenizer_config.json")
        backend = _backend(folder, config)
        special_tokens = named_tokens(folder, config)
        found = Tokenizer(
            backend,
            special_tokens=special_tokens,
            eos_token_ids=_eos_token_ids(folder, backend, special_tokens.get("eos_token")),
            templates=_templates(folder, config),
        )
        # Computed now, so that an unsupported tokenizer fails here and not with the first answer.
        try:
            _ = found.bytes_per_token
        except TokenizerError as error:
            raise TokenizerError(f"{folder}: {error}") from None
        return found

    def with_chat_template(self, source: str) -> "Tokenizer":
        """A copy with this chat template instead of its own."""
        return Tokenizer(
            self.backend,
            special_tokens=self.special_tokens,
            eos_token_ids=self.eos_token_ids,
            templates={"default": source},
        )

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, if the model has one."""
        return self.token_id(self.special_tokens.get("bos_token"))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that are markup and not text, such as the end of a turn."""
        return frozenset(
            index for index, token in self.backend.get_added_tokens_decoder().items() if token.special
        )

    @cached_property
    def content_tokens(self) -> ContentTokens:
        """Reads special tokens in clients' texts as text."""
        return ContentTokens(self.backend)

    @cached_property
    def bytes_per_token(self) -> TokenBytes:
        """The bytes of every token id, from which text is streamed."""
        decoder = self.backend.decoder
        return TokenBytes(json.loads(decoder.__getstate__()) if decoder else {}, self.backend.id_to_token)

    def token_id(self, token: str | None) -> int | None:
        """The id of a token by name; None if the vocabulary lacks it."""
        return None if token is None else self.backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, by default with what the model expects before and after it."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_pair(self, one: str, other: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of two texts as the tokenizer joins them."""
        return self.backend.encode(one, other, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`, as `Detokenizer` would stream it."""
        stream = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return stream.push(token_ids) + stream.finish()

    def detokenizer(self, *, skip_special_tokens: bool = True, behind: Iterable[int] = ()) -> Detokenizer:
        """For token ids that arrive one after the other, after those of a prompt (`behind`)."""
        return Detokenizer(self.bytes_per_token, self.special_ids if skip_special_tokens else (), behind)

    def token_text(self, token_id: int) -> str:
        """The text of a single token, special ones included; part of a character is replaced."""
        return self.bytes_per_token[token_id].decode(errors="replace")

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._templates)

    @property
    def chat_template(self) -> str | None:
        """The source of the template for conversations without tools; None if there is none."""
        return self._template(None, None).source if self._templates else None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text for a conversation; further keywords (enable_thinking, ...) reach the template.

        `continue_final_message`: the answer continues the last message instead of beginning a new one.
        `template`: a source instead of the model's own.
        """
        chosen = self._template(template, tools)
        if tools and not self._shows_tools(chosen):
            raise TokenizerError(
                "tools: the chat template has no place for tools, so the model would not see them"
            )
        if continue_final_message:
            if add_generation_prompt:
                raise TokenizerError(
                    "continue_final_message needs add_generation_prompt=False: another message begins"
                )
            return chosen.render_open(messages, tools=tools, **variables)
        return chosen.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables)

    def template_source(self, tools: object = None) -> str:
        """The source of the chat template for a conversation with these tools, or without any."""
        return self._template(None, tools).source

    def _shows_tools(self, template: ChatTemplate) -> bool:
        return template is self._templates.get("tool_use") or template.uses("tools")

    def unused_variables(self, names: Iterable[str], *, template: str | None = None) -> list[str]:
        """Those of these variables that the chat template does not use."""
        chosen = self._template(template, None)
        return [name for name in names if not chosen.uses(name)]

    def _template(self, source: str | None, tools: object) -> ChatTemplate:
        if source is not None:
            return ChatTemplate(source, self.special_tokens)
        if not self._templates:
            raise TokenizerError("this model has no chat template: give a prompt instead of messages")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        return self._templates.get(name) or next(iter(self._templates.values()))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of `apply_chat_template(messages, **options)`, which writes its own special tokens."""
        return self.encode(self.apply_chat_template(messages, **options), add_special_tokens=False)


def _backend(folder: Path, config: Mapping[str, Any]) -> Any:
    import tokenizers

    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{file} is not a readable tokenizer: {error}") from error
        # Settings for batches in training: prompts must be neither truncated nor padded.
        backend.no_truncation()
        backend.no_padding()
        add_named_tokens(backend, folder, config)
        return backend
    if not (folder / "tokenizer.model").is_file() and not (folder / "vocab.json").is_file():
        raise TokenizerError(f"{folder}: no tokenizer.json, tokenizer.model or vocab.json")
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder).backend_tokenizer
    except Exception as error:  # anything from a missing package to an unknown format
        raise TokenizerError(
            f"{folder}: no tokenizer.json, and transformers could not convert the older files: {error}"
        ) from error


def _eos_token_ids(folder: Path, backend: Any, eos_token: str | None) -> list[int]:
    """From generation_config.json and the tokenizer; from config.json only if neither has any."""
    ids = _as_list(read_json(folder / "generation_config.json").get("eos_token_id"))
    if eos_token is not None and (named := backend.token_to_id(eos_token)) is not None:
        ids.append(named)
    return ids or _as_list(read_json(folder / "config.json").get("eos_token_id"))


def _as_list(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    if (file := folder / "chat_template.jinja").is_file():
        return {"default": file.read_text()}
    given = read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template") or {}
    if isinstance(given, str):
        return {"default": given}
    return {entry["name"]: entry["template"] for entry in given}
