"""What a request is answered by a plain engine that serves nothing else: no graphs, no drafts, no cached
prefixes; with the weights that were there, and changed where they changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ostinato import LLM, LoRARequest, SamplingParams
from ostinato.engine.outputs import CompletionOutput, Logprob

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Turn:
    """Other weights, from a token of an answer on."""

    tokens: int
    """That were there already."""
    weights: int
    is_computed_again: bool
    """Whether nothing of the KV before is left."""


@dataclass(frozen=True)
class Question:
    """One completion, or the vector of a prompt."""

    prompt: tuple[int, ...]
    params: SamplingParams | None
    """None: it is embedded."""
    adapter: int | None
    """Which contents."""
    weights: int
    """At the beginning."""
    turns: tuple[Turn, ...] = ()

    def __hash__(self) -> int:
        return hash((self.prompt, repr(self.params), self.adapter, self.weights, self.turns))


@dataclass
class Answer:
    """What came of it."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    states: torch.Tensor | None = None
    """Mean and last, of a prompt that is embedded."""

    @classmethod
    def of(cls, output: CompletionOutput, prompt_logprobs: Any) -> Answer:
        """As it is now."""
        return cls(
            list(output.token_ids),
            output.text,
            output.finish_reason,
            output.stop_reason,
            output.logprobs,
            prompt_logprobs,
        )


class Alone:
    """The plain engine. All that it is asked for it says once."""

    def __init__(self, directory: str, weights: Sequence[Weights], adapters: Sequence[str]) -> None:
        self.llm = LLM(
            directory,
            cuda_graph_mode="none",
            enable_prefix_caching=False,
            max_running_requests=1,
            max_model_len=96,
            max_num_batched_tokens=96,
            enable_lora=True,
            max_loras=1,
            max_lora_rank=8,
            max_logprobs=-1,
            dtype="float32",
        )
        self._weights, self._adapters = weights, adapters
        self._now: int | None = None
        self._said: dict[Question, Answer] = {}

    def says(self, question: Question) -> Answer:
        """What it answers."""
        if question not in self._said:
            self._said[question] = self._asked(question)
        return self._said[question]

    def _asked(self, question: Question) -> Answer:
        engine = self.llm.engine
        self._use(question.weights)
        adapter, prompt = self._adapter(question.adapter), {"prompt_token_ids": list(question.prompt)}
        if question.params is None:
            served = engine.served_embedding(engine.add_embedding(prompt, adapter=adapter))
            self._run_until(len(question.prompt) + 1, lambda: 0)
            states = served.states[0]
            return Answer(states=torch.stack([states.mean, states.last]))
        output = engine.add(prompt, question.params, adapter=adapter)
        found = output.outputs[0]
        for turn in question.turns:
            self._run_until(turn.tokens, lambda: len(found.token_ids))
            self._use(turn.weights)
            if turn.is_computed_again:
                self.llm.reset_prefix_cache(reset_running_requests=True)
        self._run_until(1000, lambda: len(found.token_ids))
        assert output.error is None, output.error
        return Answer.of(found, output.prompt_logprobs)

    def _run_until(self, tokens: int, there: Any) -> None:
        while self.llm.engine.has_work and there() < tokens:
            self.llm.engine.step()

    def _use(self, weights: int) -> None:
        if weights != self._now:
            self.llm.update_weights(self._weights[weights])
            self._now = weights

    def _adapter(self, contents: int | None) -> Any:
        if contents is None:
            return None
        asked = LoRARequest(f"contents-{contents}", 1 + contents, self._adapters[contents])
        return self.llm.engine.version_of(asked)


def assert_same(found: Answer, expected: Answer, *, knows_prompt: bool = True) -> None:
    """Token for token, and numbers as far as sums in another order agree. One that did not come to its end
    is the beginning of what was expected."""
    length = len(found.token_ids)
    assert found.token_ids == expected.token_ids[:length]
    if expected.states is not None:
        if found.states is not None:
            torch.testing.assert_close(found.states, expected.states, atol=2e-3, rtol=2e-3)
        return
    if found.finish_reason in ("abort", "error"):
        # Broken off in the middle of a character, or of a stop string that is no part of the whole text.
        begun = found.text.rstrip("\ufffd")
        assert expected.text.startswith(begun) or begun.startswith(expected.text)
    else:
        assert length == len(expected.token_ids), (found, expected)
        assert found.text == expected.text
        assert (found.finish_reason, found.stop_reason) == (expected.finish_reason, expected.stop_reason)
    _assert_same_numbers(found.logprobs, expected.logprobs, length)
    if knows_prompt and found.finish_reason not in ("abort", "error"):
        _assert_same_numbers(found.prompt_logprobs, expected.prompt_logprobs, None)


def _assert_same_numbers(found: Any, expected: Any, length: int | None) -> None:
    assert (found is None) == (expected is None)
    if found is None:
        return
    assert len(found) == len(expected if length is None else expected[:length])
    for ours, theirs in zip(found, expected, strict=False):
        assert (ours is None) == (theirs is None)
        for token, one in (ours or {}).items():
            assert abs(one.logprob - theirs[token].logprob) < 5e-3, (token, ours, theirs)
