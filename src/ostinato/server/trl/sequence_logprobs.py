"""`/get_sequence_logprobs/`: what a model thinks of sequences that others have written, for distillation."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ..openai.completion import Completion
from ..openai.completions import OnToken, completions_of
from ..openai.errors import ApiError
from ..openai.requests import CompletionRequest
from ..openai.served_model import ServedModel
from ..wire.messages import TokenLogprobs
from .requests import SequenceLogprobsRequest
from .rollouts import by_rank


async def scored_sequences(
    body: SequenceLogprobsRequest, model: ServedModel, on_token: OnToken
) -> list[Completion]:
    """The requests to the engine, not started yet."""
    if len(body.sequences) != len(body.prompt_lengths):
        message = f"there are {len(body.prompt_lengths)} prompt_lengths for {len(body.sequences)} sequences"
        raise ApiError(400, message, param="prompt_lengths")
    for number, (ids, length) in enumerate(zip(body.sequences, body.prompt_lengths, strict=True)):
        if length > len(ids):
            message = f"prompt_lengths: sequence {number} has {len(ids)} tokens, and {length} are its prompt"
            raise ApiError(400, message, param="prompt_lengths")
        model.checked_prompt(ids, "sequences")
    # Nothing but the prompt is asked for.
    asked = {"max_tokens": 0, "echo": True, "prompt_logprobs": body.top_logprobs}
    found: list[Completion] = []
    for ids in body.sequences:
        await asyncio.sleep(0)  # there may be thousands, and others are served between them
        request = CompletionRequest.model_validate({**asked, "prompt": ids})
        [completion] = await completions_of(request, model, 0, on_token)
        completion.index = len(found)
        found.append(completion)
    return found


def told(body: SequenceLogprobsRequest, completions: Sequence[Completion]) -> bytes:
    """The answer; takes a while for long ones."""
    places = [
        [completion.prompt_logprobs.get(at) for at in range(length, len(completion.prompt_ids))]
        for completion, length in zip(completions, body.prompt_lengths, strict=True)
    ]
    if body.response_format == "json":
        ranked = [[by_rank(entry or []) for entry in sequence] for sequence in places]
        return msgspec.json.encode(
            {
                "logprobs": [[[value for _, value in each] for each in sequence] for sequence in ranked],
                "logprob_token_ids": [[[token for token, _ in each] for each in one] for one in ranked],
            }
        )
    return msgspec.json.encode(_in_binary(body, places))


def _in_binary(body: SequenceLogprobsRequest, places: list[list[TokenLogprobs | None]]) -> dict[str, object]:
    """Arrays in base64, as long as the longest completion; what is not there is token 0, minus infinity."""
    longest, top = max(map(len, places)), body.top_logprobs
    shape = (len(places), longest, top)
    logprobs, tokens = np.full(shape, -math.inf, np.float32), np.zeros(shape, np.int32)
    own_logprobs = np.full((*shape[:2], 1), -math.inf, np.float32)
    own_tokens = np.zeros((*shape[:2], 1), np.int32)
    for row, (ids, length) in enumerate(zip(body.sequences, body.prompt_lengths, strict=True)):
        for at, entry in enumerate(places[row]):
            if entry is None:  # the first token of all, before which there is nothing
                continue
            own = ids[length + at]
            own_tokens[row, at] = own
            own_logprobs[row, at] = next(value for token, value, _ in entry if token == own)
            best = by_rank(entry)[:top]
            tokens[row, at, : len(best)] = [token for token, _ in best]
            logprobs[row, at, : len(best)] = [value for _, value in best]
    return {
        "logprobs_b64": _encoded(logprobs),
        "token_ids_b64": _encoded(tokens),
        "actual_logprobs_b64": _encoded(own_logprobs),
        "actual_token_ids_b64": _encoded(own_tokens),
        "shape": list(shape),
        "completion_lengths": [len(sequence) for sequence in places],
    }


def _encoded(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()
