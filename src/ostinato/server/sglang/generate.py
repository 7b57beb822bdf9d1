"""`/generate`: prompts in, texts out; a stream repeats the whole text with every event, as SGLang's does."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..openai.completion import Completion
from ..openai.completions import OnToken, completions_of
from ..openai.errors import ApiError
from ..openai.generation import Generation
from ..openai.logprobs import LOWEST
from ..openai.requests import CompletionRequest
from ..openai.served_model import ServedModel
from ..openai.stream_events import ChunkEvents
from ..wire.messages import TokenLogprobs
from .requests import DEFAULT_NEW_TOKENS, GenerateRequest, GenerateSampling

_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
    "json_schema": "guided_json",
}
"""What SGLang calls differently."""
_NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "max_tokens": DEFAULT_NEW_TOKENS,
}
"""What is meant where a request does not say. The model's generation_config.json does not count here, with
SGLang as well: trainers take it that nothing is changed which they have not named."""
_THEIRS = {ours: theirs for theirs, ours in _NAMES.items()} | {"structured_outputs": "structural_tag"}


async def generations_of(
    body: GenerateRequest, model: ServedModel, wakes_every: int, on_token: OnToken
) -> list[Completion]:
    """The completions that a request asks for, not started yet."""
    prompts = _prompts(body)
    params = body.sampling_params
    each = params if isinstance(params, list) else [params or GenerateSampling()] * len(prompts)
    if len(each) != len(prompts):
        message = f"sampling_params: there are {len(each)} of them for {len(prompts)} prompts"
        raise ApiError(400, message, param="sampling_params")
    named = body.lora_path
    adapters = named if isinstance(named, list) else [named] * len(prompts)
    if len(adapters) != len(prompts):
        message = f"lora_path: there are {len(adapters)} of them for {len(prompts)} prompts"
        raise ApiError(400, message, param="lora_path")
    found: list[Completion] = []
    for prompt, sampling, adapter in zip(prompts, each, adapters, strict=True):
        adapted = model.with_adapter(adapter, "lora_path")
        before = len(found)
        try:
            asked = _as_completion(prompt, sampling, body, model.ready.preferred_sampling)
            for completion in await completions_of(asked, adapted, wakes_every, on_token):
                completion.index = len(found)
                found.append(completion)
        except ApiError as error:
            raise _renamed(error, body) from None
        _check_start(body, len(found[before].prompt_ids))
    return found


def _check_start(body: GenerateRequest, length: int) -> None:
    start = body.logprob_start_len
    if body.return_logprob and start is not None and start > length:
        message = f"logprob_start_len: {start} is behind the end of a prompt of {length} tokens"
        raise ApiError(400, message, param="logprob_start_len")


def _prompts(body: GenerateRequest) -> list[str | list[int]]:
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "give text or input_ids, one of them", param="text")
    given: Any = body.text if body.text is not None else body.input_ids
    is_one = isinstance(given, str) or isinstance(given[0], int)
    return [given] if is_one else list(given)


def _as_completion(
    prompt: str | list[int], sampling: GenerateSampling, body: GenerateRequest, preferred: Mapping[str, Any]
) -> CompletionRequest:
    given = {_NAMES.get(name, name): value for name, value in sampling.model_dump(exclude_none=True).items()}
    given = {**_NEUTRAL, **preferred, **given, "prompt": prompt}
    if (tag := given.pop("structural_tag", None)) is not None:
        given["structured_outputs"] = {"structural_tag": tag}
    if body.return_logprob:
        given["logprobs"] = body.top_logprobs_num or 0
        if body.logprob_start_len is not None and body.logprob_start_len >= 0:
            given["prompt_logprobs"] = body.top_logprobs_num or 0
    # Without an answer nothing but the prompt is asked for.
    return CompletionRequest.model_validate(given | ({"echo": True} if given["max_tokens"] == 0 else {}))


def _renamed(error: ApiError, body: GenerateRequest) -> ApiError:
    """An error about a field of the completion, about the one that the client has sent."""
    if error.param == "prompt":
        error.param = "text" if body.text is not None else "input_ids"
    elif error.param is not None and error.param != "sampling_params":
        error.param = f"sampling_params.{_THEIRS.get(error.param, error.param)}"
    return error


class _Growing:
    """One answer as far as it has come."""

    def __init__(self, completion: Completion) -> None:
        self.completion = completion
        self.text = ""
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.has_ended = False

    def grow(self) -> bool:
        """Take in what has come; whether there is something to tell."""
        piece = self.completion.take()
        self.text += piece.text
        self.ids += piece.token_ids
        self.logprobs += piece.logprobs
        return not piece.is_empty or self.completion.is_finished


class GenerateWriter(ChunkEvents):
    """Writes the answer of one request, at once or in events."""

    def __init__(self, body: GenerateRequest, generation: Generation, model: ServedModel) -> None:
        self._body = body
        self._generation = generation
        self._model = model
        self._answers = [_Growing(completion) for completion in generation.completions]
        given: Any = body.text if body.text is not None else body.input_ids
        self._is_list = len(self._answers) > 1 or not (isinstance(given, str) or isinstance(given[0], int))

    def whole(self) -> bytes:
        """An object for a prompt, a list for a list."""
        for answer in self._answers:
            answer.grow()
        answers = [self._told(answer) for answer in self._answers]
        return msgspec.json.encode(answers if self._is_list else answers[0])

    def chunks(self) -> list[bytes]:
        """The answers that have grown, each as far as it has come."""
        found = []
        for answer in self._answers:
            if not answer.has_ended and answer.grow():
                answer.has_ended = answer.completion.is_finished
                told = self._told(answer)
                if self._is_list:
                    told["index"] = answer.completion.index
                found.append(msgspec.json.encode(told))
        return found

    def _told(self, answer: _Growing) -> dict[str, Any]:
        completion = answer.completion
        id = self._generation.id
        about: dict[str, Any] = {
            "id": f"{id}_{completion.index}" if self._is_list else id,
            "finish_reason": _finish_reason(completion, answer.ids),
            "prompt_tokens": len(completion.prompt_ids),
            "completion_tokens": len(answer.ids),
            "cached_tokens": completion.num_cached_tokens,
            "weight_version": completion.weight_version,
        }
        if completion.is_finished:
            about["e2e_latency"] = (completion.last_token_at or time.perf_counter()) - completion.started_at
            about |= _accepted(completion)
        if self._body.return_logprob:
            about |= self._logprobs(answer)
        return {"text": answer.text, "output_ids": answer.ids, "meta_info": about}

    def _logprobs(self, answer: _Growing) -> dict[str, Any]:
        of_prompt, of_places = self._of_prompt(answer.completion)
        found: dict[str, Any] = {
            "input_token_logprobs": of_prompt,
            "output_token_logprobs": [self._entry(entry[0][1], entry[0][0]) for entry in answer.logprobs],
            "output_token_logprobs_length": len(answer.logprobs),
        }
        if self._body.top_logprobs_num:
            found["input_top_logprobs"] = [self._top(entry) for entry in of_places]
            found["output_top_logprobs"] = [self._top(entry) for entry in answer.logprobs]
        return found

    def _of_prompt(self, completion: Completion) -> tuple[list[Any], list[TokenLogprobs | None]]:
        start = self._body.logprob_start_len
        if start is None or start < 0:
            return [], []
        places: list[TokenLogprobs | None] = [None]
        places += [completion.prompt_logprobs.get(at) for at in range(start + 1, len(completion.prompt_ids))]
        entries = []
        for token, entry in zip(completion.prompt_ids[start:], places, strict=False):
            own = None if entry is None else next(value for which, value, _ in entry if which == token)
            entries.append(self._entry(own, token))
        return entries, places[: len(entries)]

    def _top(self, entry: TokenLogprobs | None) -> list[Any] | None:
        if entry is None:
            return None
        best = [(rank, token, value) for token, value, rank in entry if rank is not None]
        wanted = sorted(best)[: self._body.top_logprobs_num]
        return [self._entry(value, token) for _, token, value in wanted]

    def _entry(self, logprob: float | None, token: int) -> list[Any]:
        text = self._model.need_token_texts()[token] if self._body.return_text_in_logprobs else None
        return [None if logprob is None else max(logprob, LOWEST), token, text]


def _finish_reason(completion: Completion, ids: Sequence[int]) -> dict[str, Any] | None:
    match completion.finish_reason:
        case None:
            return None
        case "stop":
            matched = completion.stop_reason
            if matched is None and ids:
                matched = ids[-1]  # the end of the sequence
            return {"type": "stop", "matched": matched}
        case "length":
            return {"type": "length", "length": len(ids)}
    return {"type": "abort", "message": "the request was aborted"}


def _accepted(completion: Completion) -> dict[str, Any]:
    """What drafts brought it, if there were any."""
    if completion.drafts is None:
        return {}
    drafted, accepted = completion.drafts
    return {
        "spec_verify_ct": len(accepted),
        "spec_accept_length": 1 + sum(accepted) / len(accepted),
        "spec_accept_rate": sum(accepted) / sum(drafted),
        "spec_accept_token_num": sum(accepted),
        "spec_draft_token_num": sum(drafted),
    }
