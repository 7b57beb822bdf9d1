"""Turns what callers pass as a prompt into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ostinato.text.errors import TokenizerError
from ostinato.text.tokenizer import Tokenizer

from .parameters.sampling_params import RequestError
from .token_ids import IntArray, token_array_and_highest
from .vllm_api.prompts import WHAT_A_PROMPT_IS, are_token_ids, check_keys, kind_of

Prompt = str | Mapping[str, Any] | Sequence[int]
"""A text, or token ids (a list, an array, a tensor), or {"prompt_token_ids": [...]}, or {"prompt": "..."};
the latter two may have a "cache_salt"."""


class PromptReader:
    """Uses a model's tokenizer; without one (None), only token ids are prompts."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def read(self, prompt: Prompt) -> tuple[str | None, IntArray, int]:
        """The text of a prompt, its token ids, and the highest of them. Raises RequestError otherwise."""
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            text = prompt.get("prompt")
            if text is not None and not isinstance(text, str):
                raise RequestError(f"prompt beside prompt_token_ids must be a string, not {kind_of(text)}")
            check_keys(prompt)
            return text, *_checked_ids(prompt["prompt_token_ids"])
        if are_token_ids(prompt) or (isinstance(prompt, list | tuple) and not prompt):
            return None, *_checked_ids(prompt)
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if not isinstance(text, str):
            raise RequestError(f"{WHAT_A_PROMPT_IS}, not {kind_of(prompt)}")
        if isinstance(prompt, Mapping):
            check_keys(prompt)
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer: give {'prompt_token_ids': [...]}")
        check_text(text)
        return text, *token_array_and_highest(self._tokenizer.encode(text))

    def token_ids_of(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt. Raises RequestError if it is not a prompt."""
        found: list[int] = self.read(prompt)[1].tolist()
        return found

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """The prompt of a conversation: its text as written by the chat template, and its token ids."""
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer: give {'prompt_token_ids': [...]}")
        try:
            text = self._tokenizer.apply_chat_template(messages, **options)
        except TokenizerError as error:
            raise RequestError(str(error)) from error
        check_text(text)
        # The template writes its own special tokens.
        return {"prompt": text, "prompt_token_ids": self._tokenizer.encode(text, add_special_tokens=False)}


def check_text(text: str) -> None:
    """Raises RequestError for lone surrogates (bytes that a terminal could not decode, for example)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the prompt cannot be encoded as UTF-8: {error}") from None


def cache_salt(prompt: Prompt) -> str | None:
    """The salt that separates this prompt's part of the prefix cache, or None."""
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError(f"cache_salt must be a non-empty string, not {salt!r}")
    return salt


def _checked_ids(ids: Any) -> tuple[IntArray, int]:
    try:
        checked, highest = token_array_and_highest(ids)
        if checked.dtype != np.int32:
            raise OverflowError
    except TypeError:
        raise RequestError(f"prompt_token_ids must be a list of integers, not {ids!r}") from None
    except OverflowError:
        raise RequestError("prompt_token_ids must be token ids, integers of at least 0") from None
    return checked, highest
