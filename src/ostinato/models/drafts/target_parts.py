"""What a head borrows from its target: the embeddings and the output layer."""

from __future__ import annotations

from dataclasses import dataclass

from ..layers import Embedding, Linear
from ..transformer import Transformer


@dataclass(frozen=True, eq=False)
class TargetParts:
    """Held outside of the head's modules, so that iterating over its weights does not reach the target's."""

    embed_tokens: Embedding
    lm_head: Linear | Embedding

    @classmethod
    def of(cls, target: Transformer) -> TargetParts:
        """The parts of a model that generates."""
        return cls(target.embed_tokens, target.lm_head or target.embed_tokens)
