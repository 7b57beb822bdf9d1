"""The engine on text: prompts in, growing `RequestOutput`s out. `LLM` and `AsyncLLM` drive it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ostinato.text.errors import GrammarError, TokenizerError
from ostinato.text.grammar import Grammar, GrammarCompiler

from .completion_text import CompletionText
from .config import EngineConfig
from .core import EngineCore, Progress
from .loading import load
from .outputs import CompletionOutput, EmbeddingOutput, Logprob, RequestOutput
from .pooling import check_pooling, pooled
from .request import Request
from .sampling_params import RequestError, SamplingParams
from .times import StartupTimes

Prompt = str | Mapping[str, Any]
"""A text, or {"prompt_token_ids": [...]}, or {"prompt": "..."}."""


@dataclass
class _Tracked:
    """A prompt being served, and which of its completions each request computes."""

    output: RequestOutput
    requests: list[Request] = field(default_factory=list)
    texts: list[CompletionText | None] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)


class TextEngine:
    """An engine core with a tokenizer in front. Not thread-safe."""

    def __init__(self, config: EngineConfig, *, progress: bool | None = None) -> None:
        """Load, allocate and capture."""
        startup = StartupTimes()
        with startup.phase("load"):
            loaded = load(config)
        self.core = EngineCore(loaded, progress=progress, startup=startup)
        self.tokenizer = loaded.tokenizer
        self._tracked: dict[str, _Tracked] = {}
        self._owner: dict[str, tuple[_Tracked, int]] = {}
        self._names = itertools.count()
        self._grammars: GrammarCompiler | None = None
        # Requests without a seed get one from here: a run with the same requests repeats itself.
        self._seeds = np.random.default_rng(config.seed)

    @property
    def has_work(self) -> bool:
        """Whether a prompt is being served."""
        return bool(self._tracked) or self.core.has_work

    def new_id(self) -> str:
        """A request id that was not used before."""
        return str(next(self._names))

    # -- requests in -------------------------------------------------------------------------------

    def add(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> RequestOutput:
        """Queue a prompt; RequestError if it cannot be served. The output grows in place with each `step`."""
        name = self._name(request_id)
        text, ids = self._encoded(prompt)
        tracked = _Tracked(RequestOutput(name, text, ids, []))
        if params.prompt_logprobs is not None:
            tracked.output.prompt_logprobs = [None] * len(ids)
        for index in range(params.n):
            child = f"{name}.{index}" if params.n > 1 else name
            request = Request(
                child, tuple(ids), self._seeded(params, index), self._eos, self._grammar(params)
            )
            tracked.requests.append(request)
            tracked.texts.append(self._text_of(params))
            logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
            tracked.output.outputs.append(CompletionOutput(index, logprobs=logprobs))
        for request in tracked.requests:
            if request.request_id in self._owner:
                raise RequestError(f"request {request.request_id} is being served already: choose another id")
        # Apart from its name a completion differs in nothing that a refusal depends on: the first or none.
        for index, request in enumerate(tracked.requests):
            self.core.add(request)
            self._owner[request.request_id] = tracked, index
        self._tracked[name] = tracked
        return tracked.output

    def add_embedding(self, prompt: Prompt, request_id: str | None = None) -> str:
        """Queue a prompt to embed; its id."""
        name = self._name(request_id)
        text, ids = self._encoded(prompt)
        request = Request(name, tuple(ids), None)
        self.core.add(request)
        tracked = _Tracked(RequestOutput(name, text, ids, [CompletionOutput(0)]), [request], [None])
        self._tracked[name] = tracked
        self._owner[name] = tracked, 0
        return name

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a prompt now; its output as far as it got, or None if it is unknown or finished."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return None
        for index, request in enumerate(tracked.requests):
            if self.core.abort(request.request_id):
                self._end(tracked, index, request)
        self._forget(tracked)
        return tracked.output

    def _name(self, request_id: str | None) -> str:
        name = request_id or self.new_id()
        if name in self._tracked:
            raise RequestError(f"request {name} is being served already: choose another id")
        return name

    @property
    def _eos(self) -> frozenset[int]:
        return self.core.loaded.eos_token_ids

    def _seeded(self, params: SamplingParams, index: int) -> SamplingParams:
        if params.is_greedy:
            return replace(params, n=1)
        if params.seed is None:
            return replace(params, n=1, seed=int(self._seeds.integers(2**62)))
        # The first completion is what n=1 would give; wraps around inside 64 bits.
        seed = (params.seed + index + 2**63) % 2**64 - 2**63
        return replace(params, n=1, seed=seed)

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        if params.structured_outputs is None:
            return None
        if self.tokenizer is None:
            raise RequestError("structured outputs are about text, and this model has no tokenizer")
        try:
            if self._grammars is None:
                self._grammars = GrammarCompiler(self.tokenizer, self.core.loaded.model.config.vocab_size)
            return self._grammars.start(params.structured_outputs)
        except GrammarError as error:
            raise RequestError(str(error)) from error

    def _text_of(self, params: SamplingParams) -> CompletionText | None:
        if self.tokenizer is None or not params.detokenize:
            if params.stop:
                raise RequestError("stop strings are searched in the text, and this model has no tokenizer")
            return None
        detokenizer = self.tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
        return CompletionText(detokenizer, params.stop or (), include_stop=params.include_stop_str_in_output)

    def _encoded(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            return prompt.get("prompt"), _checked_ids(prompt["prompt_token_ids"])
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if not isinstance(text, str):
            raise RequestError(f"a prompt is a text or {{'prompt_token_ids': [...]}}, not {_kind_of(prompt)}")
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer: give {'prompt_token_ids': [...]}")
        return text, self.tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, list[int]]:
        """The prompt of a conversation."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer: give {'prompt_token_ids': [...]}")
        try:
            return {"prompt_token_ids": self.tokenizer.encode_chat(messages, **options)}
        except TokenizerError as error:
            raise RequestError(str(error)) from error

    # -- outputs out -------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step; the outputs that grew or ended. Each is the object that `add` returned."""
        changed: dict[str, RequestOutput] = {}
        for progress in self.core.step():
            found = self._owner.get(progress.request.request_id)
            if found is not None:
                tracked, index = found
                self._take_in(tracked, index, progress)
                changed[tracked.output.request_id] = tracked.output
        self.core.clock.lap("deliver")
        return list(changed.values())

    def _take_in(self, tracked: _Tracked, index: int, progress: Progress) -> None:
        request, output = progress.request, tracked.output.outputs[index]
        if progress.hidden is not None:
            tracked.hidden.append(progress.hidden)
        if progress.prompt_logprobs is not None and index == 0:
            assert tracked.output.prompt_logprobs is not None
            # By position: a preempted request computes its prompt again.
            for position, found in progress.prompt_logprobs.items():
                tracked.output.prompt_logprobs[position] = self._named(found)
        if progress.token is not None:
            output.token_ids.append(progress.token)
            if progress.logprobs is not None and output.logprobs is not None:
                output.logprobs.append(self._named(progress.logprobs))
            self._extend_text(tracked, index, request, progress.token)
        if request.is_finished:
            self._end(tracked, index, request)
            if tracked.output.finished:
                self._forget(tracked)

    def _extend_text(self, tracked: _Tracked, index: int, request: Request, token: int) -> None:
        text, output, params = tracked.texts[index], tracked.output.outputs[index], request.params
        if text is None or params is None:
            return
        ended_by_token = request.is_finished and request.finish_reason == "stop"
        if ended_by_token and not params.include_stop_str_in_output:
            return
        found = text.push(token, may_stop=len(output.token_ids) > params.min_tokens)
        output.text = text.text
        if found is not None:
            self._stop_at(tracked, index, request, found)

    def _stop_at(self, tracked: _Tracked, index: int, request: Request, stop: str) -> None:
        self.core.finish(request, stop)
        output = tracked.output.outputs[index]
        # It may have reached max_tokens with the same token; the stop string is what the caller asked for.
        output.finish_reason, output.stop_reason = "stop", stop

    def _end(self, tracked: _Tracked, index: int, request: Request) -> None:
        output, text = tracked.output.outputs[index], tracked.texts[index]
        if text is not None and output.finish_reason is None:
            stop = text.finish()
            output.text = text.text
            if stop is not None and request.finish_reason == "length":
                output.finish_reason, output.stop_reason = "stop", stop
        if output.finish_reason is None:
            assert request.finish_reason is not None
            output.finish_reason, output.stop_reason = request.finish_reason.value, request.stop_reason
        tracked.output.num_cached_tokens = max(tracked.output.num_cached_tokens, request.num_cached_tokens)
        tracked.output.error = tracked.output.error or request.error

    def _forget(self, tracked: _Tracked) -> None:
        for request in tracked.requests:
            self._owner.pop(request.request_id, None)
        self._tracked.pop(tracked.output.request_id, None)

    def _named(self, logprobs: dict[int, Logprob]) -> dict[int, Logprob]:
        if self.tokenizer is None:
            return logprobs
        return {
            token: replace(entry, decoded_token=self.tokenizer.decode([token], skip_special_tokens=False))
            for token, entry in logprobs.items()
        }

    def embed(self, prompts: Sequence[Prompt], pooling: str) -> list[EmbeddingOutput]:
        """The vectors of prompts, of length 1: from the last token's state, or the mean of all."""
        check_pooling(pooling)
        kept: list[_Tracked | EmbeddingOutput] = []
        for prompt in prompts:
            try:
                kept.append(self._tracked[self.add_embedding(prompt)])
            except RequestError as error:
                kept.append(EmbeddingOutput(self.new_id(), None, [], [], str(error)))
        while self.core.has_work:
            self.step()
        return [entry if isinstance(entry, EmbeddingOutput) else _embedding(entry, pooling) for entry in kept]

    def close(self) -> None:
        """Abort everything and drop all graphs."""
        for name in list(self._tracked):
            self.abort(name)
        self.core.close()


def _kind_of(prompt: Any) -> str:
    if isinstance(prompt, Mapping):
        return f"a mapping with {', '.join(map(repr, prompt)) or 'nothing'} in it"
    return type(prompt).__name__


def _checked_ids(ids: Any) -> list[int]:
    try:
        if isinstance(ids, str | bytes):
            raise TypeError
        checked = [operator.index(token) for token in ids]
    except TypeError:
        raise RequestError(f"prompt_token_ids must be a list of integers, not {ids!r}") from None
    if any(not 0 <= token < 2**31 for token in checked):
        raise RequestError("prompt_token_ids must be token ids, integers of at least 0")
    return checked


def _embedding(tracked: _Tracked, pooling: str) -> EmbeddingOutput:
    output = tracked.output
    if output.error is not None or not tracked.hidden:
        reason = output.error or "the request was aborted"
        return EmbeddingOutput(output.request_id, output.prompt, output.prompt_token_ids, [], reason)
    vector = pooled(tracked.hidden, len(output.prompt_token_ids), pooling).tolist()
    return EmbeddingOutput(output.request_id, output.prompt, output.prompt_token_ids, vector)
