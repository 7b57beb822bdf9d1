"""How adapters of the start are written: `--lora-modules` of vLLM, `--lora-paths` of SGLang."""

from __future__ import annotations

import json

from ostinato.graphs.errors import ConfigError

_KEYS = {"name": "name", "lora_name": "name", "path": "path", "lora_path": "path", "pinned": "pinned"}
_WITHOUT_EFFECT = ("base_model_name",)
_TYPES = {"name": str, "path": str, "pinned": bool}


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
    values.setdefault("pinned", False)
    if any(not isinstance(values.get(key), kind) for key, kind in _TYPES.items()):
        raise ConfigError(f"lora_modules: {entry!r} needs a name and a path")
    return values["name"], values["path"], values["pinned"]
