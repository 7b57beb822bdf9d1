"""What a head borrows of its target: the table of tokens, and the output layer."""

from __future__ import annotations

from dataclasses import dataclass

from ..layers import Embedding, Linear
from ..transformer import Transformer


@dataclass(frozen=True, eq=False)
class TargetParts:
    """Not modules of the head: whoever walks through its weights does not come upon the target's."""

    embed_tokens: Embedding
    lm_head: Linear | Embedding

    @classmethod
    def of(cls, target: Transformer) -> TargetParts:
        """Those of a model that generates."""
        return cls(target.embed_tokens, target.lm_head or target.embed_tokens)
