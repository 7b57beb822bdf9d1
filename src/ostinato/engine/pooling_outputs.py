"""Outputs of prompts that are only read, not completed: vectors and scores, in vLLM's structure."""

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
        """Length of the vector."""
        return len(self.embedding)


@dataclass(frozen=True)
class ClassificationOutput:
    """How likely each class is."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)


@dataclass(frozen=True)
class ScoringOutput:
    """How well two texts match."""

    score: float


Pooled = TypeVar("Pooled", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass(frozen=True)
class PoolingRequestOutput(Generic[Pooled]):
    """A prompt and its result."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: Pooled
    """Empty if `error` is set."""
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
        """The vector; empty if `error` is set."""
        return self.outputs.embedding


@dataclass(frozen=True)
class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """A prompt and its classes."""


@dataclass(frozen=True)
class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """A pair of texts and their score."""
