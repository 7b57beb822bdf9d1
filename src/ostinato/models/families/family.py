"""What a model family is to the engine: data, and how its layers follow from a `config.json`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..layer_kind import LayerKind
from .tensor_names import LIKE_LLAMA, TensorNames

RawConfig = Mapping[str, Any]
"""The contents of a `config.json`."""


@dataclass(frozen=True)
class Family:
    """What an architecture's name implies and its `config.json` does not say."""

    name: str
    """`config.json` has it before `ForCausalLM`, `Model` or `ForSequenceClassification`."""
    layers: Callable[[RawConfig, int], tuple[LayerKind, ...]]
    """The layers of a model: from its `config.json` and their number."""
    default_head_dim: int | None = None
    """Where `config.json` has none; None: the hidden size divided by the heads."""
    tensors: TensorNames = LIKE_LLAMA
    """What checkpoints call the weights."""
    gguf: str | None = None
    """`general.architecture` of its GGUF files; None: they are called by another family's name."""
    gguf_has_pairs_together: bool = False
    """Whether its GGUF files store the two members of a rotary pair side by side."""

    @property
    def architectures(self) -> tuple[str, str, str]:
        """With an output layer, without, and with one that judges texts."""
        return f"{self.name}ForCausalLM", f"{self.name}Model", f"{self.name}ForSequenceClassification"
