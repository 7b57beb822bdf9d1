"""`LoRARequest`: the adapter of a request, with vLLM's field names; and the parsing of adapters that are
listed at start-up (vLLM's `--lora-modules`, SGLang's `--lora-paths`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ostinato.graphs.errors import ConfigError

from ..parameters.sampling_params import RequestError


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by name and number. Until the adapter is removed, neither can be used for another one."""

    lora_name: str
    lora_int_id: int
    """At least 1."""
    lora_path: str = ""
    """A directory in PEFT's format; may be omitted if the adapter is already loaded."""
    load_inplace: bool = False
    """Read it again, replacing what was loaded under this name. Running requests keep the old contents."""

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise RequestError(f"lora_name must be a non-empty string, not {self.lora_name!r}")
        number = self.lora_int_id
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise RequestError(f"lora_int_id must be an integer of at least 1, not {number!r}")
        object.__setattr__(self, "lora_path", str(self.lora_path or ""))

    @property
    def name(self) -> str:
        """Its name."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """Its number."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """Its directory."""
        return self.lora_path


AskedAdapters = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts, one for each, or none."""


def one_adapter_each(given: Any, count: int) -> list[LoRARequest | None]:
    """The adapter of each of `count` prompts. Raises RequestError for anything else. One with load_inplace is
    loaded once for all of them."""
    if given is None or isinstance(given, LoRARequest):
        return _loaded_once([given] * count)
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise RequestError(f"lora_request must be a LoRARequest or a list, not {type(given).__name__}")
    for at, one in enumerate(given):
        if one is not None and not isinstance(one, LoRARequest):
            raise RequestError(f"lora_request[{at}] must be a LoRARequest, not {type(one).__name__}")
    if len(given) != count:
        raise RequestError(f"lora_request must have one entry per prompt: {len(given)} for {count} prompts")
    return _loaded_once(given)


def _loaded_once(asked: Sequence[LoRARequest | None]) -> list[LoRARequest | None]:
    seen: set[LoRARequest] = set()
    found: list[LoRARequest | None] = []
    for one in asked:
        found.append(replace(one, load_inplace=False) if one in seen and one is not None else one)
        if one is not None:
            seen.add(one)
    return found


_KEYS = {"name": "name", "lora_name": "name", "path": "path", "lora_path": "path", "pinned": "pinned"}
_WITHOUT_EFFECT = ("base_model_name",)
_TYPES = {"name": str, "path": str, "pinned": bool}


def parsed_module(entry: str) -> tuple[str, str, bool]:
    """Name, directory, and whether it is pinned, from `name=path`, a path alone, or a JSON object."""
    if not entry.lstrip().startswith("{"):
        name, found, path = entry.partition("=")
        name, path = (name, path) if found else (entry, entry)
        if not name or not path:
            raise ConfigError(f"lora_modules: {entry!r} must be name=directory")
        return name, path, False
    try:
        given = json.loads(entry)
    except ValueError as error:
        raise ConfigError(f"lora_modules: {entry!r} is not valid JSON: {error}") from error
    unknown = [key for key in given if key not in _KEYS and key not in _WITHOUT_EFFECT]
    if unknown:
        raise ConfigError(f"lora_modules: unknown key {unknown[0]}; the keys are name, path and pinned")
    values = {_KEYS[key]: value for key, value in given.items() if key in _KEYS}
    values.setdefault("pinned", False)
    if any(not isinstance(values.get(key), kind) for key, kind in _TYPES.items()):
        raise ConfigError(
            f"lora_modules: {entry!r} must have a name and a path, both strings; pinned must be true or false"
        )
    return values["name"], values["path"], values["pinned"]
