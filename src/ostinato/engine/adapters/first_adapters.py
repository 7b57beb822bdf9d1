"""The adapters that an engine begins with: `--lora-modules` of vLLM, `--lora-paths` of SGLang."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ostinato.graphs import ConfigError

from ..sampling_params import RequestError
from .lora_request import LoRARequest
from .served_adapters import ServedAdapters

_KEYS = {"name": "name", "lora_name": "name", "path": "path", "lora_path": "path", "pinned": "pinned"}
_WITHOUT_EFFECT = ("base_model_name",)


def load_first_adapters(adapters: ServedAdapters, listed: Sequence[str]) -> None:
    """Load what was listed; ConfigError names what cannot be."""
    for entry in listed:
        name, path, pinned = parsed_module(entry)
        if adapters.named(name) is not None:
            raise ConfigError(f"lora_modules: two adapters are called {name!r}")
        try:
            adapters.load(LoRARequest(name, adapters.free_id(), path), pinned=pinned)
        except RequestError as error:
            raise ConfigError(f"lora_modules: {error}") from error


def parsed_module(entry: str) -> tuple[str, str, bool]:
    """Name, directory, and whether it is pinned: of `name=path`, of a path alone, or of an object in JSON."""
    if not entry.lstrip().startswith("{"):
        name, found, path = entry.partition("=")
        name, path = (name, path) if found else (entry, entry)
        if not name or not path:
            raise ConfigError(f"lora_modules: {entry!r} is not name=directory")
        return name, path, False
    try:
        given = json.loads(entry)
    except ValueError as error:
        raise ConfigError(f"lora_modules: {entry!r} is no JSON: {error}") from error
    unknown = [key for key in given if key not in _KEYS and key not in _WITHOUT_EFFECT]
    if unknown:
        raise ConfigError(f"lora_modules: {unknown[0]} is not known; there are name, path and pinned")
    values = {_KEYS[key]: value for key, value in given.items() if key in _KEYS}
    of_types = {"name": str, "path": str, "pinned": bool}
    values.setdefault("pinned", False)
    if any(not isinstance(values.get(key), kind) for key, kind in of_types.items()):
        raise ConfigError(f"lora_modules: {entry!r} needs a name and a path")
    return values["name"], values["path"], values["pinned"]
