"""The shape of a head, from its `config.json` and the names in its checkpoint, checked against a target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..config_fields import positive
from ..config_file import read_config_file
from ..errors import ModelError, UnsupportedModelError
from .checkpoint import Checkpoint
from .head import HeadShape

_NOT_THERE = {
    "fc_norm": "norms of single features",
    "norm_output": "normalised features in a chain",
    "speculators_model_type": "checkpoints of the speculators library; convert it to EAGLE's own layout",
    "parallel_drafting": "parallel drafting",
}
_NAMES_OF_EAGLE = ("Eagle3", "Eagle", "EAGLE3", "EAGLE")


def head_shape(method: str, directory: Path, target: ModelConfig, checkpoint: Checkpoint | None) -> HeadShape:
    """The shape of the head in `directory`. Raises ModelError that names what does not fit the target.

    `checkpoint`: which parts it has of its own; None: all that its method has, with random weights.
    """
    file = directory / "config.json"
    raw = read_config_file(file, "a draft head has a config.json")
    try:
        found = _head_shape(method, raw, target, checkpoint)
    except ModelError as error:
        raise type(error)(f"{file}: {error}") from error
    return found


def _head_shape(
    method: str, raw: Mapping[str, Any], target: ModelConfig, checkpoint: Checkpoint | None
) -> HeadShape:
    for field, what in _NOT_THERE.items():
        if raw.get(field):
            raise UnsupportedModelError(f"{field}: {what} are not supported in a head")
    layer = ModelConfig.from_dict({**raw, "architectures": [_architecture(raw)]})
    options = raw.get("eagle_config") or {}
    if options.get("use_aux_hidden_state") is False:
        raise UnsupportedModelError("use_aux_hidden_state false is not supported in a head")
    _check_fit(layer, target, raw)
    stored = checkpoint.shapes if checkpoint is not None else {}
    draft_vocab = positive(raw, "draft_vocab_size", layer.vocab_size)
    if draft_vocab > target.vocab_size:
        raise ModelError(
            f"draft_vocab_size {draft_vocab} exceeds the vocabulary of the target, {target.vocab_size}"
        )
    if method == "eagle" and draft_vocab != target.vocab_size:
        raise ModelError(
            f"draft_vocab_size {draft_vocab} differs from the target's {target.vocab_size}: an EAGLE head "
            "has the target's tokens; is this one for method eagle3?"
        )
    is_eagle3 = method == "eagle3"
    return HeadShape(
        layer=layer,
        draft_vocab=draft_vocab,
        tapped_layers=_tapped_layers(raw, options, target) if is_eagle3 else (),
        fc_bias="fc.bias" in stored,
        norm_before_fc=is_eagle3 and bool(options.get("norm_before_fc", raw.get("norm_before_fc", False))),
        norm_before_residual=is_eagle3 and bool(raw.get("norm_before_residual", False)),
        has_embedding="embed_tokens.weight" in stored,
        has_lm_head="lm_head.weight" in stored or draft_vocab != target.vocab_size,
    )


def _architecture(raw: Mapping[str, Any]) -> str:
    """The layer's architecture: `LlamaForCausalLMEagle3` and `EagleLlamaModel` have layers like Llama's."""
    names = raw.get("architectures") or []
    name = str(names[0]) if isinstance(names, list) and names else ""
    for word in _NAMES_OF_EAGLE:
        name = name.replace(word, "")
    return f"{name.removesuffix('ForCausalLM').removesuffix('Model') or 'Llama'}ForCausalLM"


def _check_fit(layer: ModelConfig, target: ModelConfig, raw: Mapping[str, Any]) -> None:
    if layer.num_layers != 1:
        raise UnsupportedModelError(
            f"num_hidden_layers {layer.num_layers} is not supported in a head, only 1; for a whole model use "
            "method draft_model"
        )
    of_target = positive(raw, "target_hidden_size", layer.hidden_size)
    for name, size in (("hidden_size", layer.hidden_size), ("target_hidden_size", of_target)):
        if size != target.hidden_size:
            raise ModelError(
                f"{name} {size} differs from the target's {target.hidden_size}: the head is for another model"
            )
    if layer.vocab_size != target.vocab_size:
        raise ModelError(
            f"vocab_size {layer.vocab_size} differs from the target's {target.vocab_size}: the head is for "
            "another vocabulary"
        )


def _tapped_layers(
    raw: Mapping[str, Any], options: Mapping[str, Any], target: ModelConfig
) -> tuple[int, ...]:
    name = "eagle_aux_hidden_state_layer_ids"
    count = target.num_layers
    given = options.get(name) or raw.get(name)
    if given is None:
        if count < 4:
            raise ModelError(f"{name} is missing, and there is no default for a target with {count} layers")
        return 2, count // 2, count - 3
    is_list = isinstance(given, list) and given and all(type(layer) is int for layer in given)
    if not is_list or not all(0 <= layer < count for layer in given) or len(set(given)) != len(given):
        raise ModelError(f"{name} must be different layers of the target, 0 to {count - 1}, not {given!r}")
    return tuple(given)
