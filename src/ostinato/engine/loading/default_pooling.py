"""How a text's vector is made by default: as sentence-transformers saved it with the model."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ostinato.text.errors import TokenizerError
from ostinato.text.json_file import read_json

logger = logging.getLogger("ostinato.engine")

_USUAL = "last"
_MODES = {"lasttoken": "last", "mean": "mean"}
"""Its names, and Ostinato's."""
_DONE_ANYWAY = ("Transformer", "Pooling", "Normalize")


def default_pooling(directory: Path) -> str:
    """`last`, or what `modules.json` says; logs a warning for modules that are not computed."""
    chosen = _USUAL
    for module in _modules(directory):
        kind = str(module.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            chosen = _pooling(directory / str(module.get("path", "")) / "config.json")
        elif kind not in _DONE_ANYWAY:
            logger.warning("%s in modules.json is not computed: embeddings are those before it", kind)
    return chosen


def _modules(directory: Path) -> list[Mapping[str, Any]]:
    file = directory / "modules.json"
    if not file.is_file():
        return []
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise TokenizerError(f"{file} is not valid JSON: {error}") from error
    return [module for module in found if isinstance(module, Mapping)] if isinstance(found, list) else []


def _pooling(file: Path) -> str:
    given = read_json(file)
    flags = (name for name, is_on in given.items() if name.startswith("pooling_mode_") and is_on is True)
    modes = [name.removeprefix("pooling_mode_").removesuffix("_tokens") for name in flags]
    modes += [given["pooling_mode"]] if isinstance(given.get("pooling_mode"), str) else []
    if len(modes) == 1 and modes[0] in _MODES:
        return _MODES[modes[0]]
    logger.warning(
        "%s asks for %s: embeddings are those of the last token unless pooling is mean",
        file,
        " and ".join(modes) or "no pooling",
    )
    return _USUAL
