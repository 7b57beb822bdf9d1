"""Defaults for sampling parameters that a request leaves out: from the model's generation_config.json, used
as vLLM and SGLang use it."""

from __future__ import annotations

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
