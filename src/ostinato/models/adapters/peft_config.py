"""`adapter_config.json`: which layers an adapter changes, and by how much.

Anything that would change what the adapter computes and is not supported is refused by name, including fields
that did not exist when this was written.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import AdapterError
from .name_patterns import pattern

MAX_CONFIG_BYTES = 4 * 2**20
MAX_EXPRESSIONS = 64
"""Expressions of one configuration that are more than names."""
CONFIG_FILE = "adapter_config.json"

_USED = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"),
        *("exclude_modules", "layers_to_transform", "layers_pattern", "bias", "init_lora_weights"),
    }
)
_WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type"),
        *("peft_version", "lora_dropout", "fan_in_fan_out", "megatron_core", "qalora_group_size"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
        *("ensure_weight_tying", "unsloth_version", "unsloth_fixed"),
    }
)
"""Fields about training, or that depend on a switch that is refused."""
_REFUSED = {
    "use_dora": "DoRA scales the rows of the base weights: merge the adapter into the model",
    "modules_to_save": "whole layers were trained too: merge the adapter into the model",
    "lora_bias": "its layers have their own biases",
    "trainable_token_indices": "it changes embeddings",
    "layer_replication": "it repeats layers of the model",
    "target_parameters": "it changes parameters outside of linear layers",
    "alora_invocation_tokens": "it takes effect in the middle of a prompt",
    "use_qalora": "it pools its inputs",
    "megatron_config": "it is for Megatron's layers",
    "arrow_config": "it routes between adapters",
}
_CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga", "mica")
_LEAVES_BASE = ("gaussian", "eva", "orthogonal")
_ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class PeftConfig:
    """The fields of an `adapter_config.json` that affect the numbers."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | tuple[str, ...] | None
    exclude_modules: str | tuple[str, ...] | None
    layers_to_transform: tuple[int, ...]
    layers_pattern: tuple[str, ...]

    @classmethod
    def load(cls, directory: Path) -> PeftConfig:
        """Read the file in a directory."""
        file = directory / CONFIG_FILE
        if not directory.is_dir():
            raise AdapterError(f"there is no adapter in {directory}: no such directory")
        try:
            if file.exists() and not file.is_file():  # a pipe or a device may never end
                raise AdapterError(f"{file} is not a regular file")
            if (size := file.stat().st_size) > MAX_CONFIG_BYTES:
                raise AdapterError(f"{file} has {size:,} bytes, at most {MAX_CONFIG_BYTES:,} are read")
            raw = json.loads(file.read_bytes())
        except RecursionError:
            raise AdapterError(f"{file} cannot be read: it is nested too deep") from None
        except FileNotFoundError:
            raise AdapterError(f"{directory} is not a PEFT adapter: it has no {CONFIG_FILE}") from None
        except (OSError, ValueError) as error:
            raise AdapterError(f"{file} cannot be read: {error}") from error
        return cls.of(raw, str(file))

    @classmethod
    def of(cls, raw: object, where: str) -> PeftConfig:
        """From the contents of such a file; `where` names the adapter in errors."""
        if not isinstance(raw, Mapping):
            raise AdapterError(f"{where} does not contain a JSON object")
        _refuse(raw, where)
        try:
            config = cls(
                r=_positive(raw.get("r", 8)),
                lora_alpha=_number(raw.get("lora_alpha", 8)),
                use_rslora=_switch(raw.get("use_rslora")),
                rank_pattern={_regex(k): _positive(v) for k, v in (raw.get("rank_pattern") or {}).items()},
                alpha_pattern={_regex(k): _number(v) for k, v in (raw.get("alpha_pattern") or {}).items()},
                target_modules=_names(raw.get("target_modules")),
                exclude_modules=_names(raw.get("exclude_modules")),
                layers_to_transform=_integers(raw.get("layers_to_transform")),
                layers_pattern=tuple(map(_regex, _listed(raw.get("layers_pattern")))),
            )
            config._check_number_of_expressions()
        except (TypeError, ValueError, AttributeError) as error:
            raise AdapterError(f"{where}: a field has a value that PEFT does not write: {error}") from error
        return config

    def _check_number_of_expressions(self) -> None:
        named = [each for each in (self.target_modules, self.exclude_modules) if isinstance(each, str)]
        expressions = [*self.rank_pattern, *self.alpha_pattern, *self.layers_pattern, *named]
        if sum(not pattern(each).is_plain for each in expressions) > MAX_EXPRESSIONS:
            raise ValueError(f"it has more than {MAX_EXPRESSIONS} regular expressions")

    def rank_of(self, module: str) -> int:
        """Rank of the matrices of a layer, by its full name."""
        return self.rank_pattern.get(_pattern_of(module, self.rank_pattern), self.r)

    def scaling_of(self, module: str) -> float:
        """Factor of the product of a layer's matrices."""
        alpha = self.alpha_pattern.get(_pattern_of(module, self.alpha_pattern), self.lora_alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    @property
    def names_layers(self) -> bool:
        """Whether layers are named at all; `all-linear` means all but embeddings and the output layer."""
        return self.target_modules not in (None, _ALL_LINEAR)

    def targeted(self, modules: Iterable[str]) -> set[str]:
        """Which of these linear layers, by their full names, the adapter changes."""
        return {module for module in modules if self._is_target(module)}

    def _is_target(self, module: str) -> bool:
        if self.exclude_modules is not None and _is_named(module, self.exclude_modules):
            return False
        if self.target_modules is None or self.target_modules == _ALL_LINEAR:
            return self.target_modules is not None
        if not _is_named(module, self.target_modules):
            return False
        if not self.layers_to_transform or isinstance(self.target_modules, str):
            return True
        index = next(
            filter(None, (_layer_index(module, each) for each in self.layers_pattern or (r"[^.]*",))), None
        )
        return index is not None and int(index) in self.layers_to_transform


def _refuse(raw: Mapping[str, Any], where: str) -> None:
    kind = raw.get("peft_type", "LORA")
    if kind != "LORA":
        raise AdapterError(f"{where}: peft_type {kind!r} is not supported; supported is LORA")
    if raw.get("bias") not in (None, "none"):
        raise AdapterError(f"{where}: bias {raw['bias']!r} is not supported: biases were trained too")
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise AdapterError(
            f"{where}: init_lora_weights {start!r} is not supported: it changes the base weights; convert "
            "the adapter to plain LoRA when saving it"
        )
    if start is not None and not isinstance(start, bool) and start not in _LEAVES_BASE:
        raise AdapterError(
            f"{where}: init_lora_weights {start!r} is unknown: it may have changed the base weights"
        )
    for name, value in raw.items():
        if name in _USED or name in _WITHOUT_EFFECT or value in (None, False, 0, "") or value in ([], {}):
            continue
        why = _REFUSED.get(name, "the field is unknown")
        raise AdapterError(f"{where}: {name} is not supported: {why}")


def _pattern_of(module: str, patterns: Mapping[str, object]) -> str:
    """PEFT's rule: a pattern matches the end of a module's name."""
    return next((key for key in patterns if pattern(rf"(?:.*\.)?(?:{key})").matches(module)), module)


def _layer_index(module: str, layers: str) -> str | None:
    """PEFT's rule: the first number between dots behind a name that the pattern matches at its end."""
    for found in re.finditer(r"(?<=\.)\d+(?=\.)", module):
        if pattern(rf"(?:.*\.)?(?:{layers})").matches(module[: found.start() - 1]):
            return found.group()
    return None


def _is_named(module: str, names: str | tuple[str, ...]) -> bool:
    if isinstance(names, str):
        return pattern(names).matches(module)
    return any(module == name or module.endswith(f".{name}") for name in names)


def _names(given: Any) -> str | tuple[str, ...] | None:
    if isinstance(given, str) and given and given != _ALL_LINEAR:
        return _regex(given)
    if given is None or isinstance(given, str):
        return given or None
    return tuple(map(str, given)) or None


def _regex(given: Any) -> str:
    if not isinstance(given, str):
        raise ValueError(f"{str(given)[:200]!r} is not a regular expression")
    pattern(given)
    return given


def _listed(given: Any) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) and given else tuple(map(str, given or ()))


def _integers(given: Any) -> tuple[int, ...]:
    numbers = (given,) if isinstance(given, int) else tuple(given or ())
    if wrong := [each for each in numbers if not isinstance(each, int) or isinstance(each, bool)]:
        raise ValueError(f"a layer must be a number, not {wrong[0]!r}")
    return numbers


def _switch(given: Any) -> bool:
    if given is not None and not isinstance(given, bool):
        raise ValueError(f"a switch must be true or false, not {given!r}")
    return bool(given)


def _positive(given: Any) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ValueError(f"a rank must be an integer of at least 1, not {given!r}")
    return given


def _number(given: Any) -> float:
    if not isinstance(given, int | float) or isinstance(given, bool) or not math.isfinite(given):
        raise ValueError(f"an alpha must be a number, not {given!r}")
    return float(given)
