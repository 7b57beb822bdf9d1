"""The sampling fields of a request as the engine's `SamplingParams`."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

from ostinato.engine.parameters.parameter_checks import token_sequences
from ostinato.engine.parameters.sampling_params import RequestError, SamplingParams
from ostinato.text.structured import StructuredOutputs

from ..text_work.lanes import INLINE
from .cost import check_words
from .errors import ApiError
from .requests import Sampling
from .served_model import ServedModel, check_unicode

_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "ignore_eos",
    "min_tokens",
    "allowed_token_ids",
)


def sampling_params(
    body: Sampling,
    *,
    max_tokens: int,
    model: ServedModel,
    bad_words: list[list[int]] | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    shape: StructuredOutputs | None,
) -> SamplingParams:
    """What one completion of `body` is sampled with; n is counted by the caller.

    What it leaves out is as the model's generation_config.json says.
    """
    if body.best_of is not None and body.best_of != (body.n or 1):
        message = f"best_of: {body.best_of} completions to choose {body.n or 1} from are not made: use n"
        raise ApiError(400, message, param="best_of")
    given: dict[str, Any] = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    for name, asked in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
        _check_logprobs(body, name, asked, model.ready.max_logprobs)
    _check_named_logprobs(body, logprobs, model)
    if body.vllm_xargs and not model.ready.has_logits_processors:
        message = "vllm_xargs: nothing reads them here: the server was started without --logits-processors"
        raise ApiError(400, message, param="vllm_xargs")
    check_known("allowed_token_ids", body.allowed_token_ids or (), model.ready.vocab_size)
    try:
        return SamplingParams(
            **{**model.ready.default_sampling, **given, "max_tokens": max_tokens},
            logit_bias=_biases(body.logit_bias, model.ready.vocab_size),
            bad_words=bad_words,
            logprobs=None if body.logprob_token_ids else logprobs,
            logprob_token_ids=body.logprob_token_ids or None,
            extra_args=body.vllm_xargs or None,
            prompt_logprobs=prompt_logprobs,
            structured_outputs=shape,
        )
    except RequestError as error:
        names = (*_SAME_NAME, "max_tokens", "bad_words")
        field = next((name for name in names if str(error).startswith(name)), None)
        raise ApiError(400, str(error), param=field) from error


def _check_logprobs(body: Sampling, name: str, asked: int | None, most: int) -> None:
    if asked is None or most < 0 or 0 <= asked <= most:
        return
    # Chats have a number of their own.
    field = "top_logprobs" if name == "logprobs" and hasattr(body, "top_logprobs") else name
    message = f"{field}: at most {most} can be asked for, not {asked}; --max-logprobs allows more"
    raise ApiError(400, message, param=field)


def _check_named_logprobs(body: Sampling, logprobs: int | None, model: ServedModel) -> None:
    named = body.logprob_token_ids
    if not named:
        return
    message = "logprob_token_ids needs logprobs" if logprobs is None else None
    if getattr(body, "echo", None):
        message = "logprob_token_ids are not told of an echoed prompt: use prompt_logprobs"
    if message is not None:
        raise ApiError(400, message, param="logprob_token_ids")
    check_known("logprob_token_ids", named, model.ready.vocab_size)


def check_known(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    """400 for ids beyond these."""
    if tokens and max(tokens) >= vocab_size:
        message = f"{name}: {max(tokens)} is not a token id of this model (0 to {vocab_size - 1})"
        raise ApiError(400, message, param=name)


async def bad_words(body: Sampling, model: ServedModel) -> list[list[int]] | None:
    """The words that may not come, as tokens; made in a thread if there is much of them."""
    given = body.bad_words
    if not given:
        return None
    tokenizer = model.need_tokenizer("bad_words")
    check_words(sum(map(len, given)), "characters")
    for word in given:
        check_unicode(word, "bad_words")
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    try:
        if sum(map(len, given)) + len(given) <= INLINE:
            return token_sequences(given, encode)
        found = await asyncio.to_thread(token_sequences, given, encode)
    except RequestError as error:
        raise ApiError(400, str(error), param="bad_words") from error
    check_words(sum(map(len, found)), "tokens")
    return found


def _biases(given: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if given is None:
        return None
    biases = {}
    for key, value in given.items():
        token = int(key)
        if token >= vocab_size:
            message = f"logit_bias: {key!r} is not a token id of this model (0 to {vocab_size - 1})"
            raise ApiError(400, message, param="logit_bias")
        biases[token] = value
    return biases
