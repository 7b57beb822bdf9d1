"""The adapters that an engine starts with."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.graphs import ConfigError

from ..parameters.sampling_params import RequestError
from .lora_modules import parsed_module
from .lora_request import LoRARequest
from .served_adapters import ServedAdapters


def load_first_adapters(adapters: ServedAdapters, listed: Sequence[str]) -> None:
    """Load the listed adapters. Raises ConfigError for one that cannot be loaded."""
    for entry in listed:
        name, path, pinned = parsed_module(entry)
        if adapters.named(name) is not None:
            raise ConfigError(f"lora_modules: two adapters are called {name!r}")
        try:
            adapters.load(LoRARequest(name, adapters.free_id(), path), pinned=pinned)
        except RequestError as error:
            raise ConfigError(f"lora_modules: {error}") from error
