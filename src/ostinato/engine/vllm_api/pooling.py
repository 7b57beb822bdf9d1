"""Prompts that are only read, not completed: `LLM.embed`, `encode`, `classify`, `score`, `reward`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..adapters.lora_request import AskedAdapters, one_adapter_each
from ..delivery.pooling import check_pooling, judged, pooled
from ..delivery.request_progress import Shown
from ..delivery.served_completion import ServedCompletion
from ..interrupts import HeldSignals
from ..parameters.sampling_params import RequestError
from ..pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from ..prompt_reader import check_text
from ..text_engine import TextEngine
from .pooling_params import PoolingParams
from .prompt_outcomes import PromptOutcome, outcome_of, states_of
from .prompts import listed_prompts

TASKS = ("embed", "classify")
"""Tasks of `encode`."""
_WITHOUT = {
    "token_embed": "states of single tokens are not kept: use embed",
    "token_classify": "no model scores single tokens here: use classify",
    "score": "use score()",
    "reward": "a model that scores whole texts returns its reward with classify",
    "plugin": "plugins do not exist here: use embed or classify",
}


class Reader:
    """Reads prompts with an engine."""

    def __init__(
        self, engine: TextEngine, pooling: str, shown: Shown, lora_request: AskedAdapters = None
    ) -> None:
        """`pooling`: which state represents a prompt, last or mean. `shown`: show a progress bar."""
        check_pooling(pooling)
        self._engine = engine
        self._pooling = pooling
        self._shown = shown
        self._lora_request = lora_request

    def embed(self, prompts: Any, params: Any) -> list[EmbeddingRequestOutput]:
        """Embed the prompts as vectors."""
        listed, alone, wanted = self._asked(prompts, params, "embed")
        outcomes = self._states(listed, alone)
        outputs = [
            EmbeddingRequestOutput(*_facts(outcome), EmbeddingOutput(vector), outcome.error)
            for outcome, vector in zip(outcomes, self._vectors(outcomes, wanted), strict=True)
        ]
        return _raised(outputs, alone)

    def classify(self, prompts: Any, params: Any) -> list[ClassificationRequestOutput]:
        """Class probabilities of the prompts."""
        listed, alone, wanted = self._asked(prompts, params, "classify")
        outcomes = self._states(listed, alone)
        outputs = [
            ClassificationRequestOutput(*_facts(outcome), ClassificationOutput(found.tolist()), outcome.error)
            for outcome, found in zip(outcomes, self._classes(outcomes, wanted), strict=True)
        ]
        return _raised(outputs, alone)

    def encode(
        self, prompts: Any, params: Any, task: str | None
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The results of the requested task, as tensors."""
        listed, alone, wanted = self._asked(prompts, params, task)
        outcomes = self._states(listed, alone)
        outputs = [
            PoolingRequestOutput(*_facts(outcome), PoolingOutput(data), outcome.error)
            for outcome, data in zip(outcomes, self._data(outcomes, wanted), strict=True)
        ]
        return _raised(outputs, alone)

    def score(self, first: Any, second: Any, params: Any, template: str | None) -> list[ScoringRequestOutput]:
        """How well texts match: by the model's head if it has one, otherwise by the cosine of their
        vectors."""
        ones, others = _texts(first, "the first texts"), _texts(second, "the second texts")
        if len(ones) not in (1, len(others)):
            raise RequestError(
                f"{len(ones)} texts cannot be paired with {len(others)}: give one text, or equally many"
            )
        ones = ones * len(others) if len(ones) == 1 else ones
        wanted = params if params is not None else PoolingParams()
        if not isinstance(wanted, PoolingParams):
            raise RequestError(f"pooling_params must be PoolingParams, not {wanted!r}")
        if self._engine.core.loaded.model.config.num_labels:
            return self._judged(ones, others, wanted, template)
        if template is not None:
            raise RequestError(
                f"chat_template: {self._architecture} embeds both texts separately, so it cannot be used"
            )
        self._check_dimensions(wanted)
        return self._cosines(ones, others, wanted.dimensions)

    def _judged(
        self, ones: list[str], others: list[str], wanted: PoolingParams, template: str | None
    ) -> list[ScoringRequestOutput]:
        if self._engine.core.loaded.model.config.num_labels != 1:
            raise RequestError(
                f"score needs a model with one label, but {self._architecture} of this checkpoint has "
                f"{self._engine.core.loaded.model.config.num_labels}: use classify"
            )
        prompts = [self._pair(one, other, template) for one, other in zip(ones, others, strict=True)]
        outcomes = self._states(prompts)
        _raise_first(outcomes)
        scores = self._classes(outcomes, [wanted] * len(outcomes))
        return [
            ScoringRequestOutput(*_facts(outcome), ScoringOutput(float(score[0])))
            for outcome, score in zip(outcomes, scores, strict=True)
        ]

    def _cosines(
        self, ones: list[str], others: list[str], dimensions: int | None
    ) -> list[ScoringRequestOutput]:
        adapters = one_adapter_each(self._lora_request, len(others))
        pairs = [
            ((one, asked), (other, asked)) for one, other, asked in zip(ones, others, adapters, strict=True)
        ]
        distinct = list(dict.fromkeys([each for pair in pairs for each in pair]))
        states = self._states([text for text, _ in distinct], adapters=[asked for _, asked in distinct])
        _raise_first(states)
        outcomes = dict(zip(distinct, states, strict=True))
        kept = {each: _state(outcome, self._pooling)[:dimensions] for each, outcome in outcomes.items()}
        vectors = {each: torch.nn.functional.normalize(state, dim=0) for each, state in kept.items()}
        outputs = []
        for one, other in pairs:
            ids = outcomes[one].prompt_token_ids + outcomes[other].prompt_token_ids
            score = float(torch.dot(vectors[one], vectors[other]))
            outputs.append(ScoringRequestOutput(outcomes[other].request_id, None, ids, ScoringOutput(score)))
        return outputs

    def _pair(self, one: str, other: str, template: str | None) -> dict[str, Any]:
        """A pair of texts, as models that score pairs were trained on it: by a template, or joined by the
        model's tokenizer."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise RequestError("score needs texts, but this model has no tokenizer: use embed with token ids")
        if template is None:
            check_text(one + other)
            return {"prompt_token_ids": tokenizer.encode_pair(one, other)}
        messages = [{"role": "query", "content": one}, {"role": "document", "content": other}]
        text = tokenizer.with_chat_template(template).apply_chat_template(messages)
        check_text(text)
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def check(self, params: PoolingParams) -> None:
        """Raises RequestError if the model does not support this."""
        self._check_task(params.task)
        self._check_dimensions(params)

    def pooled(self, served: ServedCompletion, params: PoolingParams) -> PoolingRequestOutput[PoolingOutput]:
        """The result of a prompt that was added on its own."""
        outcome = outcome_of(self._engine, served)
        [data] = self._data([outcome], [params])
        return PoolingRequestOutput(*_facts(outcome), PoolingOutput(data), outcome.error)

    def _data(self, outcomes: list[PromptOutcome], wanted: list[PoolingParams]) -> list[Tensor]:
        if wanted and wanted[0].task == "classify":
            return self._classes(outcomes, wanted)
        return [torch.tensor(vector, dtype=torch.float32) for vector in self._vectors(outcomes, wanted)]

    def _states(
        self, prompts: list[Any], alone: bool = False, *, adapters: AskedAdapters = None
    ) -> list[PromptOutcome]:
        """`adapters`: of these prompts, if not those of the call."""
        shown = self._shown if self._shown is not None or not alone else False
        with HeldSignals() as signals:
            asked = one_adapter_each(adapters or self._lora_request, len(prompts))
            return states_of(self._engine, prompts, shown, signals.let_through, asked)

    # -- from states to numbers --------------------------------------------------------------------

    def _asked(
        self, prompts: Any, params: Any, task: str | None
    ) -> tuple[list[Any], bool, list[PoolingParams]]:
        listed, alone = listed_prompts(prompts)
        wanted = [params or PoolingParams()] * len(listed) if not _are_many(params) else list(params)
        if len(wanted) != len(listed):
            raise RequestError(f"{len(wanted)} pooling parameters were given for {len(listed)} prompts")
        for each in wanted:
            if not isinstance(each, PoolingParams):
                raise RequestError(f"pooling_params must be PoolingParams, not {each!r}")
        chosen = [replace(each, task=task or each.task) for each in wanted]
        if len({each.task for each in chosen}) > 1:
            raise RequestError("all prompts of one encode call must have the same pooling task")
        for each in chosen or [PoolingParams(task=task)]:
            self.check(each)
        return listed, alone, chosen

    def _check_task(self, task: str | None) -> None:
        if task is None:
            raise RequestError(f"encode needs pooling_task: {' or '.join(TASKS)}")
        if task not in TASKS:
            advice = _WITHOUT.get(task, f"use {' or '.join(TASKS)}")
            raise RequestError(f"pooling_task {task!r} is not supported: {advice}")
        if task == "classify" and not self._engine.core.loaded.model.config.num_labels:
            raise RequestError(
                f"{self._architecture} has no classification head (a ...ForSequenceClassification has one): "
                "use embed or generate"
            )

    def _check_dimensions(self, params: PoolingParams) -> None:
        size = self._engine.core.loaded.model.config.hidden_size
        if params.dimensions is not None and params.dimensions > size:
            raise RequestError(
                f"dimensions is {params.dimensions}, but this model's vectors have only {size}"
            )

    def _vectors(self, outcomes: Sequence[PromptOutcome], wanted: list[PoolingParams]) -> list[list[float]]:
        found: list[list[float]] = []
        for outcome, params in zip(outcomes, wanted, strict=True):
            if outcome.states is None:
                found.append([])
                continue
            state = outcome.states.last if self._pooling == "last" else outcome.states.mean
            kept = state[: params.dimensions]
            found.append((torch.nn.functional.normalize(kept, dim=0) if params.normalizes else kept).tolist())
        return found

    def _classes(self, outcomes: Sequence[PromptOutcome], wanted: list[PoolingParams]) -> list[Tensor]:
        model = self._engine.core.loaded.model
        found = []
        for outcome, params in zip(outcomes, wanted, strict=True):
            if outcome.states is None:
                found.append(torch.empty(0, dtype=torch.float32))
                continue
            found.append(judged(model, outcome.states, activates=params.activates))
        return found

    @property
    def _architecture(self) -> str:
        return self._engine.core.loaded.model.config.architecture


def _state(outcome: PromptOutcome, pooling: str) -> Tensor:
    assert outcome.states is not None
    return pooled(outcome.states, pooling)


def _facts(outcome: PromptOutcome) -> tuple[str, str | None, list[int]]:
    return outcome.request_id, outcome.prompt, outcome.prompt_token_ids


def _are_many(params: Any) -> bool:
    return isinstance(params, Sequence) and not isinstance(params, str)


def _texts(given: Any, what: str) -> list[str]:
    found = [given] if isinstance(given, str) else list(given) if isinstance(given, list | tuple) else [given]
    for text in found:
        if not isinstance(text, str):
            raise RequestError(f"score compares texts, but {what} contain {text!r}"[:200])
    return found


def _raised(outputs: list[Any], alone: bool) -> list[Any]:
    """The outputs. Raises RequestError for a prompt that was given alone and failed."""
    if alone and outputs[0].error is not None:
        raise RequestError(outputs[0].error)
    return outputs


def _raise_first(outcomes: Any) -> None:
    for outcome in outcomes:
        if outcome.error is not None:
            raise RequestError(outcome.error)
