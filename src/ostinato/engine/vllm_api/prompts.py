"""What may be given as a prompt, and how one is told from a list of them."""

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
    """The token ids of a text to complete, and for the record the text."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt

_KEYS = ("prompt", "prompt_token_ids", "cache_salt")

_KINDS_OF_PROMPTS = "OSUT"
"""Of numpy arrays: columns of texts, or of any objects."""

WHAT_A_PROMPT_IS = "a prompt is a text or {'prompt_token_ids': [...]} or a list of token ids"


def listed_prompts(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts as a list, and whether one was given alone; RequestError for what cannot hold prompts.

    As with vLLM `[1, 2, 3]` is one prompt of token ids, and `[[1, 2, 3]]` a list of one; of arrays and
    tensors likewise.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts], True
    if are_token_ids(prompts):
        return [{"prompt_token_ids": prompts}], True  # nobody has to look again
    if isinstance(prompts, bytes) or not hasattr(prompts, "__iter__") or getattr(prompts, "ndim", 1) == 0:
        raise RequestError(f"{WHAT_A_PROMPT_IS}, or a list of such; not {kind_of(prompts)}")
    return list(prompts), False


def check_keys(prompt: Mapping[str, Any]) -> None:
    """RequestError for a mapping that holds something beside the prompt which nobody would look at."""
    for key, value in prompt.items():
        if key in _KEYS:
            continue
        is_nothing = value is None or (isinstance(value, Mapping | list) and not value)
        if not is_nothing:
            raise RequestError(f"a prompt with {key!r} cannot be served: models here take text only")


def are_token_ids(prompt: Any) -> bool:
    """Whether this is a list of numbers, and not a list of prompts."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1 and prompt.dtype.kind not in _KINDS_OF_PROMPTS
    if isinstance(prompt, torch.Tensor):
        return prompt.ndim == 1
    if isinstance(prompt, array.array):
        return True
    if not isinstance(prompt, list | tuple | range) or not prompt:
        return False
    # Prompts are told from numbers by the first; all others are looked at without a step of Python for each.
    if not isinstance(prompt[0], int | np.integer):
        return False
    if operator.countOf(map(type, prompt), int) == len(prompt):
        return True
    return all(issubclass(kind, int | np.integer) and kind is not bool for kind in set(map(type, prompt)))


def known_token_ids(prompt: Any) -> list[int]:
    """The token ids in a prompt that was refused, as far as there are any."""
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
    if isinstance(ids, np.ndarray | torch.Tensor | array.array):
        found: list[int] = ids.tolist() if are_token_ids(ids) else []
        return found
    return list(ids) if isinstance(ids, list | tuple) else []


def kind_of(prompt: Any) -> str:
    """What somebody gave instead of a prompt, in words."""
    if isinstance(prompt, Mapping):
        return f"a mapping with {', '.join(map(repr, prompt)) or 'nothing'} in it"
    return f"{type(prompt).__name__} {prompt!r}"[:100]
