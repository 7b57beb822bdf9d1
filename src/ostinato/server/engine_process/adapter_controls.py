"""The controls of adapters: files are read in a thread, and taken in between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ostinato.engine.adapters.lora_request import LoRARequest
from ostinato.engine.adapters.served_adapters import ServedAdapters
from ostinato.engine.core import EngineCore
from ostinato.engine.parameters.sampling_params import RequestError
from ostinato.engine.weight_sync.wire_formats import sglang_tensors
from ostinato.models.adapters.adapter import Adapter

from ..wire.messages import AdapterInfo
from .control_calls import Control, Waiting


class AdapterControls:
    """What can be done with the adapters of one engine. Every answer is the list of all that are there."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def by_name(self) -> Mapping[str, Control]:
        """All that a call can name."""
        return {
            "load_adapter": self._load,
            "load_adapter_from_tensors": self._load_tensors,
            "unload_adapter": self._unload,
        }

    @property
    def _adapters(self) -> ServedAdapters:
        if self._core.adapters is None:
            raise RequestError("no adapters are served: start the server with --enable-lora")
        return self._core.adapters

    def _load(self, adapter: str, path: str, *, load_inplace: bool = False, pinned: bool = False) -> Waiting:
        adapters = self._adapters
        self._refuse_taken(adapter, load_inplace)
        read = yield lambda: adapters.read(path)
        self._refuse_taken(adapter, load_inplace)  # meanwhile
        known = adapters.named(adapter)
        number = adapters.free_id() if known is None else known.lora_int_id
        adapters.load(LoRARequest(adapter, number, path, load_inplace), read, pinned=pinned)
        return adapter_list(self._core)

    def _load_tensors(
        self, adapter: str, config: dict[str, Any], payload: str, load_format: str | None, pinned: bool
    ) -> Waiting:
        adapters = self._adapters
        self._refuse_taken(adapter, False)

        def made() -> Adapter:
            tensors = dict(sglang_tensors([payload], load_format))
            return adapters.made_of(adapter, config, tensors)

        read = yield made
        self._refuse_taken(adapter, False)  # meanwhile
        adapters.load(LoRARequest(adapter, adapters.free_id()), read, pinned=pinned)
        return adapter_list(self._core)

    def _refuse_taken(self, adapter: str, load_inplace: bool) -> None:
        if self._adapters.named(adapter) is not None and not load_inplace:
            raise RequestError(
                f"the adapter {adapter!r} is loaded already: give load_inplace to replace it "
                "(/v1/load_lora_adapter has it), or unload it first"
            )

    def _unload(self, adapter: str) -> object:
        self._adapters.remove(adapter)
        return adapter_list(self._core)


def adapter_list(core: EngineCore) -> list[AdapterInfo]:
    """All adapters that are loaded."""
    if core.adapters is None:
        return []
    return [
        AdapterInfo(each.name, each.lora_int_id, each.path, each.is_pinned, each.digest.hex())
        for each in core.adapters.listed()
    ]
