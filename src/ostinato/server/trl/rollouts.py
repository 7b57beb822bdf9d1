"""`/generate/` and `/chat/`: prompts in, token ids and log probabilities out; no text is told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from ..openai.completion import Completion
from ..openai.completions import OnToken, completions_of
from ..openai.errors import ApiError
from ..openai.logprobs import LOWEST
from ..openai.requests import CompletionRequest
from ..openai.served_model import ServedModel
from ..wire.messages import TokenLogprobs
from .requests import ChatRequest, GenerateRequest, Rollout

_MODE = "processed_logprobs"


class RolloutBody(msgspec.Struct, frozen=True):
    """The answer. Of a prompt there are n completions, one behind the other."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[list[float]]] | None
    """Of each token of each completion: the sampled one's and the likeliest ones', likeliest first."""
    logprob_token_ids: list[list[list[int]]] | None


class Rollouts:
    """The completions of one request, in the order of its prompts."""

    def __init__(self) -> None:
        self.completions: list[Completion] = []
        self._prompts: list[list[int]] = []
        self._tells_logprobs = False

    @classmethod
    async def of(cls, body: GenerateRequest | ChatRequest, model: ServedModel, on_token: OnToken) -> Rollouts:
        """Those that a request asks for, not started yet."""
        asked = _sampling(body)
        param = "prompts" if isinstance(body, GenerateRequest) else "messages"
        found = cls()
        found._tells_logprobs = asked.get("logprobs") is not None
        if found._tells_logprobs:
            _check_mode(model)
        for ids in await _prompts(
            body, model, asked.pop("truncate_prompt_tokens", None), asked["max_tokens"]
        ):
            model.checked_prompt(ids, param)
            # As vLLM's LLM.generate: an answer ends where the model's context does.
            room = min(asked["max_tokens"], model.ready.max_model_len - len(ids))
            request = CompletionRequest.model_validate({**asked, "prompt": ids, "max_tokens": max(1, room)})
            await asyncio.sleep(0)  # there may be thousands, and others are served between them
            found._prompts.append(ids)
            found.completions += await completions_of(request, model, 0, on_token)
        for number, completion in enumerate(found.completions):
            completion.index = number
        return found

    def told(self) -> bytes:
        """The answer, when all have come to their end."""
        pieces = [completion.take() for completion in self.completions]
        logprobs = ids = None
        if self._tells_logprobs:
            sorted_ = [[by_rank(entry) for entry in piece.logprobs] for piece in pieces]
            ids = [[[token for token, _ in entry] for entry in piece] for piece in sorted_]
            logprobs = [[[value for _, value in entry] for entry in piece] for piece in sorted_]
        return msgspec.json.encode(
            RolloutBody(self._prompts, [piece.token_ids for piece in pieces], logprobs, ids)
        )


def by_rank(entry: TokenLogprobs) -> list[tuple[int, float]]:
    """Tokens with their log probabilities, likeliest first."""
    ranked = sorted(entry, key=lambda each: each[2] or 0)
    return [(token, max(value, LOWEST)) for token, value, _ in ranked]


def _sampling(body: Rollout) -> dict[str, Any]:
    """Fields of a `CompletionRequest`."""
    not_sampling = {"prompts", "images", "messages", "chat_template_kwargs", "tools"}
    given = body.model_dump(exclude_none=True, by_alias=True, exclude=not_sampling)
    regex, further = given.pop("structured_outputs_regex", None), given.pop("generation_kwargs", {})
    given |= further
    if regex is not None:
        given["structured_outputs"] = {"regex": regex}
    return given


async def _prompts(
    body: GenerateRequest | ChatRequest, model: ServedModel, kept: int | None, answer: int
) -> Sequence[list[int]]:
    found = []
    if isinstance(body, GenerateRequest):
        if body.images is not None and len(body.images) != len(body.prompts):
            message = f"images: there are {len(body.images)} for {len(body.prompts)} prompts"
            raise ApiError(400, message, param="images")
        for prompt in body.prompts:
            found.append(
                await model.encode(prompt, "prompts", is_prompt=kept is None)
                if isinstance(prompt, str)
                else prompt
            )
    else:
        for messages in body.messages:
            found.append(
                await model.encode_chat(
                    messages, body.tools or (), variables=body.chat_template_kwargs, is_prompt=kept is None
                )
            )
    return [model.cut(ids, kept, answer) for ids in found]


def _check_mode(model: ServedModel) -> None:
    """TRL compares them with its own, of the distribution that is sampled, and is told nothing of a mode."""
    mode = model.ready.vllm_config["model_config"]["logprobs_mode"]
    if mode != _MODE:
        message = (
            f"logprobs: TRL takes them for those of the distribution that is sampled, and these are {mode}: "
            f"start the server with --logprobs-mode {_MODE}"
        )
        raise ApiError(400, message, param="logprobs")
