"""The sampling fields of a request as the engine's `SamplingParams`."""

from __future__ import annotations

from typing import Any

from ostinato.engine.sampling_params import RequestError, SamplingParams
from ostinato.text.structured import StructuredOutputs

from ..wire.messages import Ready
from .errors import ApiError
from .requests import Sampling

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
)


def sampling_params(
    body: Sampling,
    *,
    max_tokens: int,
    ready: Ready,
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
    try:
        return SamplingParams(
            **{**ready.default_sampling, **given, "max_tokens": max_tokens},
            logit_bias=_biases(body.logit_bias, ready.vocab_size),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured_outputs=shape,
        )
    except RequestError as error:
        field = next((name for name in (*_SAME_NAME, "max_tokens") if str(error).startswith(name)), None)
        raise ApiError(400, str(error), param=field) from error


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
