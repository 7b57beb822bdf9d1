"""The engine on text: prompts in, growing `RequestOutput`s out. `LLM` and `AsyncLLM` drive it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ostinato.text.errors import TokenizerError

from .config import EngineConfig
from .core import EngineCore
from .delivery.completion_text import CompletionText
from .delivery.delivery import Delivery
from .delivery.pooling import check_pooling, pooled
from .delivery.served_completion import ServedCompletion
from .loading.load import load
from .outputs import CompletionOutput, EmbeddingOutput, RequestOutput
from .sampling_params import RequestError, SamplingParams
from .scheduling.request import Request
from .stepping.times import StartupTimes
from .token_ids import IntArray, token_array

Prompt = str | Mapping[str, Any]
"""A text, or {"prompt_token_ids": [...]}, or {"prompt": "..."}."""


class TextEngine:
    """An engine core with a tokenizer in front. Not thread-safe."""

    def __init__(self, config: EngineConfig, *, progress: bool | None = None) -> None:
        """Load, allocate and capture."""
        startup = StartupTimes()
        with startup.phase("load"):
            loaded = load(config)
        self.core = EngineCore(loaded, progress=progress, startup=startup)
        self.tokenizer = loaded.tokenizer
        self._served: dict[str, list[ServedCompletion]] = {}
        """By the name of the prompt."""
        self._taken_names: set[str] = set()
        self._delivery = Delivery(self.tokenizer, self.core.finish)
        self.ended: list[RequestOutput] = []
        """Outputs that ended with the last step."""
        self._names = itertools.count()
        # Requests without a seed get one from here: a run with the same requests repeats itself.
        self._seeds = np.random.default_rng(config.seed)

    @property
    def has_work(self) -> bool:
        """Whether a prompt is being served."""
        return bool(self._served) or self.core.has_work

    def new_id(self) -> str:
        """A request id that was not used before."""
        return str(next(self._names))

    # -- requests in -------------------------------------------------------------------------------

    def add(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> RequestOutput:
        """Queue a prompt; RequestError if it cannot be served. The output grows in place with each `step`."""
        name = self._name(request_id)
        text, ids = self._encoded(prompt)
        whole = _output(name, text, ids)
        if params.prompt_logprobs is not None:
            whole.prompt_logprobs = [None] * len(ids)
        self._serve([self._completion(whole, ids, params, index) for index in range(params.n)])
        return whole

    def add_embedding(self, prompt: Prompt, request_id: str | None = None) -> str:
        """Queue a prompt to embed; its id."""
        name = self._name(request_id)
        text, ids = self._encoded(prompt)
        whole, output = _output(name, text, ids), CompletionOutput(0)
        whole.outputs.append(output)
        self._serve([ServedCompletion(Request(name, ids, None), whole, output, output.token_ids)])
        return name

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a prompt now; its output as far as it got, or None if it is unknown or finished."""
        completions = self._served.get(request_id)
        if completions is None:
            return None
        for completion in completions:
            if self.core.abort(completion.request.request_id):
                completion.end()
        self._forget(request_id)
        return completions[0].whole

    def _completion(
        self, whole: RequestOutput, ids: IntArray, params: SamplingParams, index: int
    ) -> ServedCompletion:
        name = f"{whole.request_id}.{index}" if params.n > 1 else whole.request_id
        own = self._seeded(params, index)
        output = CompletionOutput(index, logprobs=None if params.logprobs is None else [])
        text = self._text_of(params, output.token_ids)
        if text is not None:
            output.text = text
        whole.outputs.append(output)
        request = Request(name, ids, own, self._eos, self.core.following.text(params))
        return ServedCompletion(
            request,
            whole,
            output,
            output.token_ids,
            text,
            has_stops=bool(params.stop),
            has_siblings=params.n > 1,
        )

    def _serve(self, completions: list[ServedCompletion]) -> None:
        for completion in completions:
            if (name := completion.request.request_id) in self._taken_names:
                raise RequestError(f"request {name} is being served already: choose another id")
        # Apart from its name a completion differs in nothing that a refusal depends on: the first or none.
        for completion in completions:
            self.core.add(completion.request)
            self._delivery.add(completion)
            self._taken_names.add(completion.request.request_id)
        self._served[completions[0].whole.request_id] = completions

    def _name(self, request_id: str | None) -> str:
        name = request_id or self.new_id()
        if name in self._served:
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

    def _text_of(self, params: SamplingParams, token_ids: list[int]) -> CompletionText | None:
        if self.tokenizer is None or not params.detokenize:
            if params.stop:
                raise RequestError("stop strings are searched in the text, and this model has no tokenizer")
            return None
        detokenizer = self.tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
        include_stop = params.include_stop_str_in_output
        return CompletionText(detokenizer, token_ids, params.stop or (), include_stop=include_stop)

    def _encoded(self, prompt: Prompt) -> tuple[str | None, IntArray]:
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            return prompt.get("prompt"), _checked_ids(prompt["prompt_token_ids"])
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if not isinstance(text, str):
            raise RequestError(f"a prompt is a text or {{'prompt_token_ids': [...]}}, not {_kind_of(prompt)}")
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer: give {'prompt_token_ids': [...]}")
        return text, token_array(self.tokenizer.encode(text))

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
        changed, self.ended = self._delivery.take_in(self.core.step())
        for output in self.ended:
            self._forget(output.request_id)
        self.core.clock.lap("deliver")
        return changed

    def _forget(self, name: str) -> None:
        for completion in self._served.pop(name):
            self._delivery.remove(completion)
            self._taken_names.remove(completion.request.request_id)

    def embed(self, prompts: Sequence[Prompt], pooling: str) -> list[EmbeddingOutput]:
        """The vectors of prompts, of length 1: from the last token's state, or the mean of all."""
        check_pooling(pooling)
        kept: list[ServedCompletion | EmbeddingOutput] = []
        for prompt in prompts:
            try:
                kept.extend(self._served[self.add_embedding(prompt)])
            except RequestError as error:
                kept.append(EmbeddingOutput(self.new_id(), None, [], [], str(error)))
        while self.core.has_work:
            self.step()
        return [entry if isinstance(entry, EmbeddingOutput) else _embedding(entry, pooling) for entry in kept]

    def close(self) -> None:
        """Abort everything and drop all graphs."""
        for name in list(self._served):
            self.abort(name)
        self.core.close()


def _kind_of(prompt: Any) -> str:
    if isinstance(prompt, Mapping):
        return f"a mapping with {', '.join(map(repr, prompt)) or 'nothing'} in it"
    return type(prompt).__name__


def _checked_ids(ids: Any) -> IntArray:
    try:
        checked = token_array(ids)
        if checked.size and not 0 <= checked.min() <= checked.max() < 2**31:
            raise OverflowError
    except TypeError:
        raise RequestError(f"prompt_token_ids must be a list of integers, not {ids!r}") from None
    except OverflowError:
        raise RequestError("prompt_token_ids must be token ids, integers of at least 0") from None
    return checked


def _output(name: str, text: str | None, ids: IntArray) -> RequestOutput:
    output = RequestOutput(name, text, [], [])
    # Few read it, and a list of a long prompt takes longer to make than the whole request to schedule.
    output.read_later(prompt_token_ids=functools.cache(ids.tolist))
    return output


def _embedding(served: ServedCompletion, pooling: str) -> EmbeddingOutput:
    output = served.whole
    if output.error is not None or not served.states:
        reason = output.error or "the request was aborted"
        return EmbeddingOutput(output.request_id, output.prompt, output.prompt_token_ids, [], reason)
    vector = pooled(served.states[0], pooling).tolist()
    return EmbeddingOutput(output.request_id, output.prompt, output.prompt_token_ids, vector)
