"""The `config.json` of a model or of a draft head."""

import json
from pathlib import Path
from typing import Any

from .errors import ModelError


def read_config_file(file: Path, who_has_one: str) -> dict[str, Any]:
    """The file's object. Raises ModelError if there is none; `who_has_one` is added if the file is
    missing."""
    if not file.is_file():
        raise ModelError(f"{file} does not exist; {who_has_one}")
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{file} contains a {type(raw).__name__}, not an object")
    return raw
