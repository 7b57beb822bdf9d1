"""What may be passed as a prompt, and how it is distinguished from a list of prompts."""

from __future__ import annotations

import array
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch

from ..parameters.sampling_params import RequestError


class TextPrompt(TypedDict):
    """A text to complete."""

    prompt: str


class TokensPrompt(TypedDict):
    """The token ids of a text to complete, optionally with the text itself."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt

_KEYS = ("prompt", "prompt_token_ids", "cache_salt")

_KINDS_OF_PROMPTS = "OSUT"
"""Kinds of numpy arrays that hold prompts: columns of texts, or of any objects."""

WHAT_A_PROMPT_IS = "a prompt must be a string or {'prompt_token_ids': [...]} or a list of token ids"


def listed_prompts(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts as a list, and whether a single one was given. Raises RequestError for other types.

    As with vLLM, `[1, 2, 3]` is one prompt of token ids, and `[[1, 2, 3]]` is a list of one; the same holds
    for arrays and tensors.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts], True
    if are_token_ids(prompts):
        return [{"prompt_token_ids": prompts}], True  # need not be checked again
    if isinstance(prompts, bytes) or not hasattr(prompts, "__iter__") or getattr(prompts, "ndim", 1) == 0:
        raise RequestError(f"{WHAT_A_PROMPT_IS}, or a list of such prompts, not {kind_of(prompts)}")
    return list(prompts), False


def check_keys(prompt: Mapping[str, Any]) -> None:
    """Raises RequestError for a mapping with entries besides the prompt that would be ignored."""
    for key, value in prompt.items():
        if key in _KEYS:
            continue
        is_nothing = value is None or (isinstance(value, Mapping | list) and not value)
        if not is_nothing:
            raise RequestError(f"a prompt with {key!r} cannot be served: models here take text only")


def are_token_ids(prompt: Any) -> bool:
    """Whether this is a list of numbers rather than a list of prompts."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1 and prompt.dtype.kind not in _KINDS_OF_PROMPTS
    if isinstance(prompt, torch.Tensor):
        return prompt.ndim == 1
    if isinstance(prompt, array.array):
        return True
    if not isinstance(prompt, list | tuple | range) or not prompt:
        return False
    # The first item tells prompts from numbers; the others are checked without running Python code for each.
    if not isinstance(prompt[0], int | np.integer):
        return False
    if operator.countOf(map(type, prompt), int) == len(prompt):
        return True
    return all(issubclass(kind, int | np.integer) and kind is not bool for kind in set(map(type, prompt)))


def known_token_ids(prompt: Any) -> list[int]:
    """The token ids in a refused prompt, if there are any."""
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
    if isinstance(ids, np.ndarray | torch.Tensor | array.array):
        found: list[int] = ids.tolist() if are_token_ids(ids) else []
        return found
    return list(ids) if isinstance(ids, list | tuple) else []


def kind_of(prompt: Any) -> str:
    """A description of a value that is not a prompt."""
    if isinstance(prompt, Mapping):
        return f"a mapping with {', '.join(map(repr, prompt)) or 'nothing'} in it"
    return f"{type(prompt).__name__} {prompt!r}"[:100]
