"""The adapters of an engine that is started again: those that the one before had, as they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.engine.adapters.lora_request import LoRARequest
from ostinato.engine.adapters.served_adapters import ServedAdapters
from ostinato.engine.core import EngineCore
from ostinato.engine.parameters.sampling_params import RequestError

from ..wire.messages import AdapterInfo


def without_adapters(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an engine that loads none itself, and serves them if it did before."""
    given = dict(options)
    if given.pop("lora_modules", None):
        given["enable_lora"] = True
    return given


def load_again(core: EngineCore, adapters: Sequence[AdapterInfo]) -> dict[str, str]:
    """Load these; by name, why one could not be. An engine that served none has none to load."""
    lost: dict[str, str] = {}
    for each in adapters:
        assert core.adapters is not None
        try:
            _load(core.adapters, each)
        except (RequestError, OSError) as error:
            lost[each.name] = str(error)
    return lost


def _load(adapters: ServedAdapters, wanted: AdapterInfo) -> None:
    if not wanted.path:
        raise RequestError("it was given as tensors, which ended with the engine; load it again")
    read = adapters.read(wanted.path)
    # Whoever names it means what was loaded, not what lies there now.
    if read.digest.hex() != wanted.digest:
        raise RequestError(f"{wanted.path} has changed since it was loaded; load it again")
    adapters.load(LoRARequest(wanted.name, wanted.id, wanted.path), read, pinned=wanted.pinned)
