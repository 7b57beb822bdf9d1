"""The shape of a model, read from a Hugging Face `config.json`; what cannot run is refused here."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ModelError, UnsupportedModelError


@dataclass(frozen=True)
class RopeConfig:
    """How positions become rotation angles."""

    theta: float = 10_000.0
    """Base of the wavelengths."""
    kind: str = "default"
    """One of `SUPPORTED_ROPE`."""
    factor: float = 1.0
    """How far `linear` and `llama3` stretch the context."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths longer than original_max_positions / this are stretched in full."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths shorter than original_max_positions / this are left alone."""
    original_max_positions: int = 8192
    """llama3: the context length before stretching."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything that distinguishes one supported model from another."""

    architecture: str
    """The name in `config.json`, one of `SUPPORTED_ARCHITECTURES`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    layer_windows: tuple[int | None, ...]
    """Per layer: how many positions a token sees, itself included; None is all of them."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    has_lm_head: bool
    """False for a bare `...Model` checkpoint: it embeds, it does not generate."""
    dtype: str
    """The dtype the checkpoint asks for: float32, float16 or bfloat16."""

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
        architecture, family = _architecture(raw)
        _refuse_unsupported(raw)
        hidden_size = _positive(raw, "hidden_size")
        num_layers = _positive(raw, "num_hidden_layers")
        num_heads = _positive(raw, "num_attention_heads")
        num_kv_heads = _positive(raw, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ModelError(
                f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
            )
        if not (raw.get("head_dim") or family.default_head_dim) and hidden_size % num_heads:
            raise ModelError(
                f"without head_dim, hidden_size {hidden_size} must be a multiple of num_attention_heads, "
                f"{num_heads}"
            )
        head_dim = _positive(raw, "head_dim", family.default_head_dim or hidden_size // num_heads)
        if head_dim % 2:
            raise ModelError(f"head_dim {head_dim} is odd; rotary embeddings need pairs")
        attention_bias = bool(raw.get("attention_bias", False)) and family.reads_attention_bias
        return ModelConfig(
            architecture=architecture,
            vocab_size=_positive(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive(raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=_positive(raw, "max_position_embeddings", 2048),
            rms_norm_eps=_positive_float(raw, "rms_norm_eps", 1e-6),
            rope=_rope(raw),
            layer_windows=_layer_windows(raw, family, num_layers),
            qkv_bias=attention_bias or family.always_qkv_bias,
            output_bias=attention_bias,
            mlp_bias=bool(raw.get("mlp_bias", False)) and family.reads_mlp_bias,
            qk_norm=family.qk_norm,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            has_lm_head=architecture.endswith("ForCausalLM"),
            dtype=_dtype(raw),
        )


@dataclass(frozen=True)
class _Family:
    """What an architecture's name implies and its `config.json` does not say."""

    always_qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    default_head_dim: int | None = None
    window: str = "never"
    """`never`; `every-layer` when sliding_window is set; `on-request` by use_sliding_window."""


_FAMILIES = {
    "Llama": _Family(reads_attention_bias=True, reads_mlp_bias=True),
    "Mistral": _Family(window="every-layer"),
    "Qwen2": _Family(always_qkv_bias=True, window="on-request"),
    "Qwen3": _Family(reads_attention_bias=True, qk_norm=True, default_head_dim=128, window="on-request"),
}
SUPPORTED_ARCHITECTURES = tuple(
    f"{family}{head}" for head in ("ForCausalLM", "Model") for family in _FAMILIES
)
"""Values of `architectures` in a `config.json` that the engine runs (`...Model`: embedding only)."""
SUPPORTED_ROPE = ("default", "linear", "llama3")
"""Values of `rope_type` that the engine computes."""
SUPPORTED_DTYPES = ("float32", "float16", "bfloat16")
"""Values of `dtype` that weights may be loaded in."""
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")


def _architecture(raw: Mapping[str, Any]) -> tuple[str, _Family]:
    names = raw.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else None
    if name not in SUPPORTED_ARCHITECTURES:
        given = (
            f"architecture {name}"
            if name
            else f"a model of type {raw.get('model_type')!r} with no architecture"
        )
        raise UnsupportedModelError(
            f"{given} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return name, _FAMILIES[name.removesuffix("ForCausalLM").removesuffix("Model")]


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


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` beside `rope_scaling` (before)."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"rope_parameters must be an object, not {given!r}")
    kind = given.get("rope_type") or given.get("type") or "default"
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModelError("rope parameters that differ between layers are not supported")
    if kind not in SUPPORTED_ROPE:
        raise UnsupportedModelError(
            f"rope_type {kind!r} is not supported; supported are {', '.join(SUPPORTED_ROPE)}"
        )
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor {partial} is not supported; supported is 1.0")
    theta = _positive_float(given, "rope_theta", raw.get("rope_theta") or 10_000.0)
    if kind == "default":
        return RopeConfig(theta)
    factor = _positive_float(given, "factor")
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    low, high = _positive_float(given, "low_freq_factor"), _positive_float(given, "high_freq_factor")
    if low >= high:
        raise ModelError(f"rope low_freq_factor {low} must be less than high_freq_factor {high}")
    return RopeConfig(theta, kind, factor, low, high, _positive(given, "original_max_position_embeddings"))


def _layer_windows(raw: Mapping[str, Any], family: _Family, num_layers: int) -> tuple[int | None, ...]:
    asked = family.window == "every-layer" or (
        family.window == "on-request" and raw.get("use_sliding_window")
    )
    if not asked or raw.get("sliding_window") is None:
        return (None,) * num_layers
    window = _positive(raw, "sliding_window")
    if family.window == "every-layer":
        return (window,) * num_layers
    types = raw.get("layer_types")
    if types is None:
        first = int(raw.get("max_window_layers", 28))
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(types) != num_layers or not set(types) <= {"sliding_attention", "full_attention"}:
        raise UnsupportedModelError(
            f"layer_types must name {num_layers} layers of sliding_attention or full_attention, not {types}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _dtype(raw: Mapping[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in SUPPORTED_DTYPES:
        raise UnsupportedModelError(
            f"dtype {name!r} is not supported; supported are {', '.join(SUPPORTED_DTYPES)}"
        )
    return name


def _number(raw: Mapping[str, Any], field: str, default: float | None) -> float:
    value = raw.get(field)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"{field} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"{field} must be a positive number, not {value!r}")
    return value


def _positive_float(raw: Mapping[str, Any], field: str, default: float | None = None) -> float:
    return float(_number(raw, field, default))


def _positive(raw: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = _number(raw, field, default)
    if value != int(value):
        raise ModelError(f"{field} must be a whole number, not {value!r}")
    return int(value)
