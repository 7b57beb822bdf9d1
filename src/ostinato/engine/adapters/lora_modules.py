"""Parsing of adapters given at startup: vLLM's `--lora-modules`, SGLang's `--lora-paths`."""

from __future__ import annotations

import json

from ostinato.graphs.errors import ConfigError

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
