"""Limits the cost of a request, counted in the HTTP process before anything of it reaches the engine.

Fields have limits of their own, but costs multiply: a list is looked at for each completion, and log
probabilities are told for each token of each completion. Products are limited here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ostinato.engine.parameters.sampling_params import SamplingParams

from .errors import ApiError
from .requests import Sampling

if TYPE_CHECKING:
    from .completion import Completion

MAX_LISTED = 2**20
"""Entries of a request's lists, times its completions."""
MAX_WORDS = 2**17
"""Characters of all bad words together, and their tokens: each is looked at in this process."""
MAX_TOLD = 2**24
"""Log probabilities in an answer: tokens times those told with each."""
MAX_ARGUMENT_VALUES = 100_000
"""Values in the JSON texts of earlier tool calls: they are read as JSON of the body is."""
_CHARACTERS_OF_AN_ENTRY = 8
_STRUCTURE = np.zeros(256, dtype=bool)
_STRUCTURE[[ord(character) for character in '[{,"']] = True


def check_lists(body: Sampling, num_completions: int) -> None:
    """400 for lists that are too long for so many completions. Costs no more than reading their lengths."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    entries = {
        "bad_words": sum(1 + len(word) // _CHARACTERS_OF_AN_ENTRY for word in body.bad_words or ()),
        "logit_bias": len(body.logit_bias or ()),
        "allowed_token_ids": len(body.allowed_token_ids or ()),
        "logprob_token_ids": len(body.logprob_token_ids or ()),
        "stop_token_ids": len(body.stop_token_ids or ()),
        "stop": sum(1 + len(text) // _CHARACTERS_OF_AN_ENTRY for text in stops),
    }
    if (total := sum(entries.values())) * num_completions > MAX_LISTED:
        raise _too_long(max(entries, key=lambda name: entries[name]), total, num_completions)


def check_words(size: int, what: str) -> None:
    """400 for bad words with too many characters or tokens in all."""
    if size > MAX_WORDS:
        raise ApiError(
            400,
            f"bad_words: they have {size:,} {what} together, at most {MAX_WORDS:,} are read",
            param="bad_words",
            code="request_too_costly",
        )


def check_cost(completions: Sequence[Completion], vocab_size: int) -> None:
    """400 for completions whose lists or log probabilities are too many together, whatever asked for them."""
    listed = told = 0
    entries, last = 0, None
    for completion in completions:
        params = completion.params_of_prompt
        if params is not last:
            entries, last = _entries(params), params
        listed += entries
        each = _told_with_each(params, vocab_size)
        told += len(completion.prompt_ids) * _times(params.prompt_logprobs, vocab_size)
        told += each * (params.max_tokens or 0)
    if listed > MAX_LISTED:
        raise _too_long(None, listed // len(completions), len(completions))
    if told > MAX_TOLD:
        raise ApiError(
            400,
            f"logprobs: the answer may have {told:,} log probabilities, at most {MAX_TOLD:,} are told: "
            "ask for fewer of them, shorter answers or fewer completions",
            param="logprobs",
            code="request_too_costly",
        )


def check_arguments(texts: Iterable[str]) -> None:
    """400 for arguments of earlier tool calls with too many values: they are JSON inside of JSON."""
    values = 0
    for text in texts:
        read = np.frombuffer(text.encode(errors="replace"), dtype=np.uint8)
        values += int(np.count_nonzero(_STRUCTURE[read]))
    if values > MAX_ARGUMENT_VALUES:
        raise ApiError(
            400,
            "messages: the arguments of their tool calls have too many values: at most "
            f"{MAX_ARGUMENT_VALUES:,} are read",
            param="messages",
            code="request_too_costly",
        )


def _too_long(field: str | None, entries: int, num_completions: int) -> ApiError:
    return ApiError(
        400,
        f"{field or 'the lists of the request'}: {entries:,} entries for each of {num_completions:,} "
        f"completions are too many, the product may be {MAX_LISTED:,}: shorten the lists, or ask for fewer "
        "completions at once",
        param=field,
        code="request_too_costly",
    )


def _entries(params: SamplingParams) -> int:
    lists = (params.logit_bias, params.allowed_token_ids, params.logprob_token_ids, params.stop_token_ids)
    characters = sum(map(len, params.stop or ()))
    return (
        sum(len(each or ()) for each in lists)
        + sum(map(len, params.bad_words or ()))
        + (characters // _CHARACTERS_OF_AN_ENTRY)
    )


def _told_with_each(params: SamplingParams, vocab_size: int) -> int:
    if params.logprob_token_ids:
        return 1 + len(params.logprob_token_ids)
    return _times(params.logprobs, vocab_size)


def _times(asked: int | None, vocab_size: int) -> int:
    """Log probabilities of one token, if so many of the likeliest are asked for; -1: all."""
    return 0 if asked is None else 1 + (vocab_size if asked < 0 else asked)
