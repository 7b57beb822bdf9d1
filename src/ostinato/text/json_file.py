"""The JSON files next to a model's weights."""

import json
from pathlib import Path
from typing import Any

from .errors import TokenizerError


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file; empty if the file does not exist."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise TokenizerError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} holds a {type(content).__name__}, not an object")
    return content
