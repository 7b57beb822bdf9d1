"""Defaults of requests that a model's directory sets: sampling parameters, and how texts become vectors."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ostinato.graphs import ConfigError
from ostinato.models.default_model import DEFAULT_MODEL_SAMPLING
from ostinato.text.errors import TokenizerError
from ostinato.text.json_file import read_json

from ..config import EngineConfig
from ..parameters.sampling_params import RequestError, SamplingParams

FILE = "generation_config.json"

_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Its names, and Ostinato's. The rest of the file (do_sample, beams, ids) is not used for sampling, nor is it
by vLLM and SGLang; ids that end a text belong to the tokenizer."""


def default_sampling(asked: EngineConfig, directory: Path) -> dict[str, Any]:
    """Fields of `SamplingParams`; empty for neutral values. Raises TokenizerError for a broken file."""
    return _from_config(asked, directory) | preferred_sampling(asked)


def _from_config(asked: EngineConfig, directory: Path) -> dict[str, Any]:
    if asked.generation_config == "none":
        return {}
    if asked.generation_config == "auto":
        published = DEFAULT_MODEL_SAMPLING if asked.model is None else {}
        return published | _read(directory / FILE)
    file = Path(asked.generation_config).expanduser() / FILE
    if not file.is_file():
        raise ConfigError(f"generation_config: there is no {file}; use auto, none or a folder with a {FILE}")
    return _read(file)


def preferred_sampling(asked: EngineConfig) -> dict[str, Any]:
    """The defaults from `override_generation_config`."""
    given: Mapping[str, Any] = asked.override_generation_config or {}
    known = _FIELDS.keys() | _FIELDS.values()
    for name in given:
        if name not in known:
            names = ", ".join(_FIELDS)
            raise ConfigError(f"override_generation_config: {name!r} is not supported; supported: {names}")
    return _checked(given, "override_generation_config", ConfigError)


def _read(file: Path) -> dict[str, Any]:
    return _checked(read_json(file), str(file), TokenizerError)


def _checked(given: Mapping[str, Any], source: str, wrong: type[Exception]) -> dict[str, Any]:
    found = {_FIELDS.get(name, name): value for name, value in given.items() if value is not None}
    found = {name: value for name, value in found.items() if name in _FIELDS.values()}
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise wrong(f"{source}: {error}") from error
    return found


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
