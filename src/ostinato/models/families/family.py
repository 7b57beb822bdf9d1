"""What the engine needs to know about a model family: data, and how layers follow from a `config.json`."""

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
    """In `config.json`: what precedes `ForCausalLM`, `Model` or `ForSequenceClassification`."""
    layers: Callable[[RawConfig, int], tuple[LayerKind, ...]]
    """The layers of a model, from its `config.json` and their number."""
    default_head_dim: int | None = None
    """Used if `config.json` has none; None: the hidden size divided by the number of heads."""
    tensors: TensorNames = LIKE_LLAMA
    """Names of the weights in checkpoints."""
    gguf: str | None = None
    """`general.architecture` of its GGUF files; None: they use another family's name."""
    gguf_has_pairs_together: bool = False
    """Whether its GGUF files store the two members of a rotary pair side by side."""

    @property
    def architectures(self) -> tuple[str, str, str]:
        """With an output layer, without one, and with a classification head."""
        return f"{self.name}ForCausalLM", f"{self.name}Model", f"{self.name}ForSequenceClassification"
