"""`/v1/completions`: prompts in, the completions of each out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ostinato.engine.parameters.sampling_params import SamplingParams

from .completion import Completion, Piece
from .cost import check_lists
from .errors import ApiError
from .generation import Generation
from .logprobs import CompletionLogprobsBuilder, prompt_logprobs
from .requests import CompletionRequest, Sampling
from .responses import CompletionBody, CompletionChoice, CompletionLogprobs, Metadata, Usage
from .sampling import bad_words, sampling_params
from .served_model import ServedModel
from .stream_events import ChunkEvents
from .structured import answer_shape
from .tool_use import ToolUse

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""

OnToken = Callable[[Completion, float], None]


async def completions_of(
    body: CompletionRequest, model: ServedModel, wakes_every: int, on_token: OnToken
) -> list[Completion]:
    """The completions that a request asks for, not started yet."""
    if body.logprobs is not None or body.stop:
        model.need_tokenizer("logprobs" if body.logprobs is not None else "stop")
    prompt_only = body.max_tokens == 0
    if prompt_only and not body.echo:
        raise ApiError(400, "max_tokens is 0 and echo is not set: nothing is asked for", param="max_tokens")
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs are not part of a stream", param="prompt_logprobs")
    of_prompt = body.logprobs if body.echo else None
    if body.prompt_logprobs is not None:
        model.need_tokenizer("prompt_logprobs")
        asked = (of_prompt or 0, body.prompt_logprobs)
        of_prompt = -1 if -1 in asked else max(asked)
    prompts = body.prompt if isinstance(body.prompt, list) and not isinstance(body.prompt[0], int) else [0]
    check_lists(body, len(prompts) * (body.n or 1))
    param, shape = answer_shape(body, ToolUse(), "none")
    words = await bad_words(body, model)
    found: list[Completion] = []
    params: SamplingParams | None = None
    for ids in await _prompts(body, model):
        wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
        if body.max_tokens is None:
            wanted = min(wanted, model.ready.max_model_len - len(ids))
        max_tokens = model.checked_max_tokens(wanted, len(ids), "max_tokens")
        if params is None or params.max_tokens != max_tokens:  # all prompts of a length share their lists
            params = sampling_params(
                body,
                max_tokens=max_tokens,
                model=model,
                bad_words=words,
                logprobs=body.logprobs,
                prompt_logprobs=of_prompt,
                shape=shape,
            )
        for number in range(body.n or 1):
            found.append(
                Completion(
                    len(found),
                    ids,
                    params,
                    model,
                    number=number,
                    keeps_output=not prompt_only,
                    shape_param=param,
                    cache_salt=body.cache_salt,
                    wakes_every=wakes_every,
                    on_token=on_token,
                )
            )
    return found


async def _prompts(body: CompletionRequest, model: ServedModel) -> list[list[int]]:
    given = body.prompt
    listed: list[Any] = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    prompts = []
    is_whole = body.truncate_prompt_tokens is None
    for prompt in listed:
        special = body.add_special_tokens is not False
        ids = (
            await model.encode(prompt, "prompt", add_special_tokens=special, is_prompt=is_whole)
            if isinstance(prompt, str)
            else prompt
        )
        room = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
        ids = model.cut(ids, body.truncate_prompt_tokens, room)
        prompts.append(model.checked_prompt(ids, "prompt"))
    return prompts


def usage_of_chunks(body: Sampling, generation: Generation) -> tuple[bool, Usage | msgspec.UnsetType | None]:
    """Whether a stream ends with its usage, and what its other chunks say about it."""
    options = body.stream_options
    if options is not None and options.continuous_usage_stats:
        return options.include_usage, generation.usage
    wants_usage = options is not None and options.include_usage
    return wants_usage, None if wants_usage else msgspec.UNSET


class CompletionWriter(ChunkEvents):
    """Writes the answer of one request, at once or in chunks."""

    def __init__(self, body: CompletionRequest, generation: Generation, model: ServedModel) -> None:
        self._body = body
        self._generation = generation
        self._model = model
        self._ends_told: set[int] = set()
        self._usage_told = False
        self._prompts_told: set[int] = set()
        self._logprobs: list[CompletionLogprobsBuilder] = []
        if body.logprobs is not None:
            shown = model.shown_tokens(body.return_tokens_as_token_ids)
            top = -1 if body.logprob_token_ids else body.logprobs
            for each in generation.completions:
                skips = each.params.skip_special_tokens
                answer = model.detokenizer(each.prompt_ids, skip_special_tokens=skips)
                assert answer is not None
                self._logprobs.append(CompletionLogprobsBuilder(shown, top, answer))

    def whole(self) -> bytes:
        """The answer, when the generation is finished."""
        choices = [self._choice(completion, completion.take()) for completion in self._generation.completions]
        return msgspec.json.encode(self._ended(choices))

    def chunks(self) -> list[bytes]:
        """What has come since the last time."""
        wants_usage, usage = usage_of_chunks(self._body, self._generation)
        chunks = []
        for completion in self._generation.completions:
            if completion.index in self._ends_told:
                continue
            piece = completion.take()
            if self._is_worth_a_chunk(completion, piece):
                choice = self._choice(completion, piece)
                chunks.append(msgspec.json.encode(self._wrapped([choice], usage=usage)))
                if completion.is_finished:
                    self._ends_told.add(completion.index)
        if wants_usage and not self._usage_told and self._generation.is_finished:
            self._usage_told = True
            chunks.append(msgspec.json.encode(self._ended([])))
        return chunks

    def _is_worth_a_chunk(self, completion: Completion, piece: Piece) -> bool:
        if piece.text or piece.logprobs or completion.is_finished:
            return True
        # Without a text to show for it, a token is told only to those who see tokens.
        return bool(piece.token_ids) and (bool(self._body.return_token_ids) or self._model.tokenizer is None)

    def _choice(self, completion: Completion, piece: Piece) -> CompletionChoice:
        logprobs = None
        text = piece.text
        if self._logprobs:
            logprobs = CompletionLogprobs()
            # With 0 OpenAI lists none, and vLLM the token that came: whoever asks as its clients do is one.
            in_vllms_way = self._body.logprob_token_ids or self._body.return_tokens_as_token_ids
            if self._body.logprobs == 0 and not in_vllms_way:
                logprobs.top_logprobs = None
        is_first = completion.index not in self._prompts_told
        self._prompts_told.add(completion.index)
        if is_first and self._body.echo:
            echo = self._echo(completion)
            text = echo + text
            if logprobs is not None:
                self._logprobs[completion.index].add_prompt(
                    logprobs, echo, completion.prompt_ids, completion.prompt_logprobs
                )
        if logprobs is not None:
            self._logprobs[completion.index].add(logprobs, piece.logprobs)
        choice = CompletionChoice(
            completion.index, text, logprobs, completion.finish_reason, completion.stop_reason
        )
        if self._body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(
                self._model.need_token_texts(), len(completion.prompt_ids), completion.prompt_logprobs
            )
        if self._body.return_token_ids:
            choice.token_ids = piece.token_ids
            if is_first:
                choice.prompt_token_ids = completion.prompt_ids
        return choice

    def _echo(self, completion: Completion) -> str:
        """The prompt as it was given, or what is left of it."""
        body, tokenizer = self._body, self._model.tokenizer
        number = completion.index // (body.n or 1)
        given = body.prompt if isinstance(body.prompt, str) else body.prompt[number]
        if isinstance(given, str) and body.truncate_prompt_tokens is None:
            return given
        if tokenizer is None:
            return ""
        left = tokenizer.decode(completion.prompt_ids, skip_special_tokens=False)
        return given if isinstance(given, str) and given in left else left

    def _ended(self, choices: list[CompletionChoice]) -> CompletionBody:
        body = self._wrapped(choices, usage=self._generation.usage)
        body.metrics = self._model.draft_metrics.of(self._generation.drafts)
        return body

    def _wrapped(self, choices: list[CompletionChoice], usage: Any) -> CompletionBody:
        generation = self._generation
        body = CompletionBody(generation.id, generation.created, self._model.name, choices, usage)
        if any(choice.finish_reason is not None for choice in choices):
            body.metadata = Metadata(generation.completions[choices[-1].index].weight_version)
        return body
