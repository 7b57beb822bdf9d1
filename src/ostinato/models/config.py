"""The shape of a model, read from a Hugging Face `config.json`; what cannot run is refused here."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config_fields import positive, positive_float
from .errors import ModelError, UnsupportedModelError
from .families import BY_ARCHITECTURE, Family
from .layer_kind import LayerKind
from .rope import RopeConfig, read_rope

SUPPORTED_ARCHITECTURES = tuple(BY_ARCHITECTURE)
SUPPORTED_DTYPES = ("float32", "float16", "bfloat16")
"""Values of `dtype` that weights may be loaded in."""
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")


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
    """False for a bare `...Model` checkpoint: it embeds, it does not generate."""
    dtype: str
    """The dtype the checkpoint asks for: float32, float16 or bfloat16."""

    @property
    def family(self) -> Family:
        """What the architecture's name implies."""
        return BY_ARCHITECTURE[self.architecture]

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.layers)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Per layer: how many positions a token sees, itself included; None is all of them."""
        return tuple(kind.window for kind in self.layers)

    @property
    def attention_scale(self) -> float:
        """What attention scores are multiplied by before the softmax."""
        return self.head_dim**-0.5

    @staticmethod
    def load(path: str | Path) -> "ModelConfig":
        """Read `path`, a `config.json` or the directory that holds one."""
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        if not file.is_file():
            raise ModelError(f"{file} does not exist; a Hugging Face model directory holds a config.json")
        try:
            raw = json.loads(file.read_text())
        except ValueError as error:
            raise ModelError(f"{file} is not valid JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ModelError(f"{file} holds a {type(raw).__name__}, not an object")
        try:
            return ModelConfig.from_dict(raw)
        except ModelError as error:
            raise type(error)(f"{file}: {error}") from error

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> "ModelConfig":
        """Check and convert the contents of a `config.json`."""
        architecture = _architecture(raw)
        family = BY_ARCHITECTURE[architecture]
        _refuse_unsupported(raw)
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
            max_position_embeddings=positive(raw, "max_position_embeddings", 2048),
            rms_norm_eps=positive_float(raw, "rms_norm_eps", 1e-6),
            rope=read_rope(raw),
            layers=family.layers(raw, positive(raw, "num_hidden_layers")),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            has_lm_head=architecture.endswith("ForCausalLM"),
            dtype=_dtype(raw),
        )


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else None
    if name not in BY_ARCHITECTURE:
        given = (
            f"architecture {name}"
            if name
            else f"a model of type {raw.get('model_type')!r} with no architecture"
        )
        raise UnsupportedModelError(
            f"{given} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return name


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    for field in _EXPERT_FIELDS:
        if raw.get(field):
            raise UnsupportedModelError(
                f"mixture of experts ({field}={raw[field]}) is not supported; dense only"
            )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"quantised weights (quant_method {method!r}) are not supported; "
            "supported are plain safetensors and GGUF"
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
