"""The shape of a model, read from a Hugging Face `config.json`; unsupported models are refused here."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .config_fields import positive, positive_float
from .config_file import read_config_file
from .errors import ModelError, UnsupportedModelError
from .families import BY_ARCHITECTURE, Family
from .layer_kind import LayerKind
from .rope import RopeConfig, longest_context, read_rope, with_overrides

logger = logging.getLogger("ostinato.models")

SUPPORTED_ARCHITECTURES = tuple(BY_ARCHITECTURE)
SUPPORTED_DTYPES = ("float32", "float16", "bfloat16")
"""Values of `dtype` in which weights can be loaded."""
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")


class _NotedReads(dict[str, Any]):
    """Records which of its keys were read."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


@dataclass(frozen=True)
class ModelConfig:
    """Everything that distinguishes one supported model from another."""

    architecture: str
    """The name in `config.json`, one of `SUPPORTED_ARCHITECTURES`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    layers: tuple[LayerKind, ...]
    tie_word_embeddings: bool
    has_lm_head: bool
    """False for a bare `...Model` checkpoint, which only embeds."""
    dtype: str
    """The checkpoint's dtype: float32, float16 or bfloat16."""
    num_labels: int = 0
    """Number of labels of a `...ForSequenceClassification`; 0 for other models."""
    label_activation: str = "softmax"
    """What turns its logits into probabilities: softmax, sigmoid; none for a regression head."""

    @property
    def family(self) -> Family:
        """What the architecture's name implies."""
        return BY_ARCHITECTURE[self.architecture]

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @cached_property  # read in every layer of a step
    def layer_windows(self) -> tuple[int | None, ...]:
        """Per layer: how many positions a token sees, itself included; None is all of them."""
        return tuple(kind.window for kind in self.layers)

    @property
    def attention_scale(self) -> float:
        """What attention scores are multiplied by before the softmax."""
        return self.head_dim**-0.5

    @staticmethod
    def load(path: str | Path, overrides: Mapping[str, Any] | None = None) -> "ModelConfig":
        """Read `path`, a `config.json` or its directory; `overrides` take precedence over its fields."""
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        raw = read_config_file(file, "a Hugging Face model directory has a config.json")
        try:
            noted = _NotedReads(with_overrides(raw, overrides or {}))
            config = ModelConfig.from_dict(noted)
        except ModelError as error:
            raise type(error)(f"{file}: {error}") from error
        for name in sorted((overrides or {}).keys() - noted.read):
            logger.warning("hf_overrides: %s has no effect: this field of config.json is not used", name)
        return config

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> "ModelConfig":
        """Check and convert the contents of a `config.json`."""
        architecture = _architecture(raw)
        family = BY_ARCHITECTURE[architecture]
        _refuse_unsupported(raw)
        rope = read_rope(raw)
        num_heads = positive(raw, "num_attention_heads")
        num_kv_heads = positive(raw, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ModelError(
                f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
            )
        return ModelConfig(
            architecture=architecture,
            vocab_size=positive(raw, "vocab_size"),
            hidden_size=positive(raw, "hidden_size"),
            intermediate_size=positive(raw, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(raw, family, num_heads),
            max_position_embeddings=longest_context(raw, rope),
            rms_norm_eps=positive_float(raw, "rms_norm_eps", 1e-6),
            rope=rope,
            layers=family.layers(raw, positive(raw, "num_hidden_layers")),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            has_lm_head=architecture.endswith("ForCausalLM"),
            dtype=_dtype(raw),
            num_labels=_num_labels(raw) if architecture.endswith("ForSequenceClassification") else 0,
            label_activation=_label_activation(raw),
        )


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else None
    if name not in BY_ARCHITECTURE:
        given = (
            f"architecture {name}"
            if name
            else f"a model of type {raw.get('model_type')!r} without an architecture"
        )
        raise UnsupportedModelError(
            f"{given} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return name


def _num_labels(raw: Mapping[str, Any]) -> int:
    """2 if the file does not say, as in transformers."""
    return positive(raw, "num_labels", len(raw.get("id2label") or {}) or 2)


def _label_activation(raw: Mapping[str, Any]) -> str:
    """By the kind of problem that the head was trained for; otherwise as in vLLM."""
    problem = raw.get("problem_type")
    if problem == "regression":
        return "none"
    return "sigmoid" if problem == "multi_label_classification" or _num_labels(raw) == 1 else "softmax"


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    for field in _EXPERT_FIELDS:
        if raw.get(field):
            raise UnsupportedModelError(
                f"mixture of experts ({field}={raw[field]}) is not supported; dense only"
            )
    if quantization := raw.get("quantization_config"):
        is_told = isinstance(quantization, Mapping)
        method = quantization.get("quant_method", "unknown") if is_told else quantization
        raise UnsupportedModelError(
            f"quantised weights (quant_method {method!r}) are not supported; "
            "supported are plain safetensors and GGUF"
        )
    if not raw.get("is_causal", True):
        raise UnsupportedModelError(
            "attention to later tokens too (is_causal false) is not supported; supported is causal attention"
        )
    if (activation := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported; supported is silu")


def _head_dim(raw: Mapping[str, Any], family: Family, num_heads: int) -> int:
    hidden_size = positive(raw, "hidden_size")
    if not (raw.get("head_dim") or family.default_head_dim) and hidden_size % num_heads:
        raise ModelError(
            f"without head_dim, hidden_size {hidden_size} must be a multiple of num_attention_heads, "
            f"{num_heads}"
        )
    head_dim = positive(raw, "head_dim", family.default_head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(f"head_dim {head_dim} is odd; rotary embeddings need pairs")
    return head_dim


def _dtype(raw: Mapping[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in SUPPORTED_DTYPES:
        raise UnsupportedModelError(
            f"dtype {name!r} is not supported; supported are {', '.join(SUPPORTED_DTYPES)}"
        )
    return name
