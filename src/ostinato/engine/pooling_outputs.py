"""What a caller gets for prompts that are not completed but read: vectors and scores, in vLLM's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch


@dataclass(frozen=True, eq=False)
class PoolingOutput:
    """Numbers about a prompt."""

    data: torch.Tensor


@dataclass(frozen=True)
class EmbeddingOutput:
    """A prompt as one vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


@dataclass(frozen=True)
class ClassificationOutput:
    """How likely each class is."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many there are."""
        return len(self.probs)


@dataclass(frozen=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float


Pooled = TypeVar("Pooled", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass(frozen=True)
class PoolingRequestOutput(Generic[Pooled]):
    """A prompt and what was found about it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: Pooled
    """Empty where `error` says why."""
    error: str | None = None
    """Why the request was refused or failed, if it was."""
    num_cached_tokens: int = 0
    """Always 0: pooling needs the states of all tokens."""
    finished: bool = True


@dataclass(frozen=True)
class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """A prompt and its vector."""

    @property
    def embedding(self) -> list[float]:
        """The vector; empty where `error` says why."""
        return self.outputs.embedding


@dataclass(frozen=True)
class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """A prompt and its classes."""


@dataclass(frozen=True)
class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """A pair of texts and their score."""
