"""The adapters that an engine knows: loaded, replaced, removed, pinned; the host holds more than the device.

Reading files (`read`) is separate from installing what was read (`load`): reading may run in any thread
alongside the engine's steps, everything else belongs between two steps.
"""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ostinato.graphs import ConfigError
from ostinato.models.adapters.adapter import Adapter
from ostinato.models.adapters.errors import AdapterError
from ostinato.models.adapters.reading import AdapterReader
from ostinato.models.adapters.stacks import AdapterStacks

from ..parameters.sampling_params import RequestError
from .lora_request import LoRARequest, parsed_module
from .slots import AdapterSlots, AdapterVersion


@dataclass(eq=False)
class _Known:
    """An adapter by name; its contents may have been dropped to make room on the host."""

    lora_int_id: int
    path: str
    """Where it can be read again; empty: nowhere."""
    digest: bytes
    version: AdapterVersion


@dataclass(frozen=True)
class LoadedAdapter:
    """An entry of `list_adapters`."""

    name: str
    lora_int_id: int
    path: str
    is_pinned: bool
    is_on_device: bool
    num_requests: int
    """Unfinished ones."""
    digest: bytes
    """Of its contents."""


class ServedAdapters:
    """The adapters of one engine."""

    def __init__(self, reader: AdapterReader, stacks: AdapterStacks, max_on_host: int) -> None:
        self._reader, self._stacks = reader, stacks
        self._max_on_host = max_on_host
        self.slots = AdapterSlots(stacks.num_slots)
        """Which version has which slot."""
        self._known: dict[str, _Known] = {}
        """Least recently requested first."""
        self._num_versions = 0

    # -- reading, in any thread --------------------------------------------------------------------

    def read(self, path: str) -> Adapter:
        """The adapter in a directory. Raises RequestError if it cannot be served."""
        try:
            return self._reader.read(path)
        except AdapterError as error:
            raise RequestError(str(error)) from error

    def made_of(self, name: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Adapter:
        """The adapter with these tensors; `config` is what its adapter_config.json would hold."""
        try:
            return self._reader.made_of(config, tensors, name)
        except AdapterError as error:
            raise RequestError(str(error)) from error

    # -- between two steps -------------------------------------------------------------------------

    def path_to_read(self, asked: LoRARequest) -> str | None:
        """What has to be read before `load` or `version_of` can take this adapter; None: nothing."""
        known = self._of(asked)
        if known is None or asked.load_inplace:
            path = asked.lora_path or (known.path if known is not None else "")
            if not path:
                raise RequestError(
                    f"adapter {asked.lora_name!r} is not loaded: give its directory as lora_path"
                )
            return path
        return known.path if known.version.adapter is None else None

    def version_of(self, asked: LoRARequest, read: Adapter | None = None) -> AdapterVersion:
        """The version that a request for this adapter computes with, loaded first if necessary. `read`: the
        contents of `path_to_read`, if already read."""
        if read is not None and not asked.lora_path and asked.lora_name not in self._known:
            self._of(asked)
            self._put(asked, "", read)
        elif (path := self.path_to_read(asked)) is not None:
            self._take_in(asked, path, self.read(path) if read is None else read)
        self._known[asked.lora_name] = known = self._known.pop(asked.lora_name)  # now most recent
        self._make_room(keep=known)
        return known.version

    def named(self, name: str) -> LoRARequest | None:
        """The request that selects the adapter of this name; None if it is not loaded."""
        known = self._known.get(name)
        return None if known is None else LoRARequest(name, known.lora_int_id, known.path)

    def load(self, asked: LoRARequest, read: Adapter | None = None, *, pinned: bool = False) -> bool:
        """Load an adapter. False if it was already loaded."""
        is_new = asked.load_inplace or asked.lora_name not in self._known
        if pinned:
            self._check_pin(asked.lora_name)
        version = self.version_of(asked, read)
        if pinned:
            self.slots.pin(version)
        return is_new

    def remove(self, name: str) -> None:
        """Forget an adapter. Raises RequestError if it does not exist or requests use it."""
        known = self._known.get(name)
        if known is None:
            raise RequestError(f"no adapter {name!r} is loaded")
        if known.version.num_users:
            count = known.version.num_users
            raise RequestError(
                f"adapter {name!r} is in use by {count} unfinished request{'s' if count > 1 else ''}: wait "
                "for them or abort them, then remove it"
            )
        del self._known[name]
        self.slots.retire(known.version)

    def pin(self, name: str) -> None:
        """Reserve the adapter's slot on the device and its place on the host."""
        known = self._known.get(name)
        if known is None:
            raise RequestError(f"no adapter {name!r} is loaded")
        self._check_pin(name)
        self.slots.pin(known.version)

    def _check_pin(self, name: str) -> None:
        others = [known.version for each, known in self._known.items() if each != name]
        num_slots = len(self.slots.tenants)
        left = num_slots - sum(other.is_pinned for other in others)
        if not left:
            raise RequestError(
                f"adapter {name!r} cannot be pinned: all {num_slots} slots are reserved for others; raise "
                "max_loras"
            )
        waiting = [other.name for other in others if other.num_users and not other.is_pinned]
        if left == 1 and waiting:
            raise RequestError(
                f"adapter {name!r} cannot be pinned: no slot would be left for requests of "
                f"{waiting[0]!r}; raise max_loras"
            )

    def name_of(self, lora_int_id: int) -> str | None:
        """The name of the adapter with this number."""
        return next((n for n, known in self._known.items() if known.lora_int_id == lora_int_id), None)

    def listed(self) -> list[LoadedAdapter]:
        """All known adapters, ordered by number."""
        found = [
            LoadedAdapter(
                name,
                known.lora_int_id,
                known.path,
                known.version.is_pinned,
                self.slots.slot_of(known.version) is not None,
                known.version.num_users,
                known.digest,
            )
            for name, known in self._known.items()
        ]
        return sorted(found, key=lambda each: each.lora_int_id)

    def free_id(self) -> int:
        """A number that no adapter has."""
        return 1 + max((known.lora_int_id for known in self._known.values()), default=0)

    def check_runs(self, version: AdapterVersion) -> None:
        """Raises RequestError if a request with this version could never run."""
        pinned = [known.version for known in self._known.values() if known.version.is_pinned]
        if not version.is_pinned and len(pinned) >= len(self.slots.tenants):
            raise RequestError(
                f"adapter {version.name!r} has no slot: all {len(pinned)} are reserved for pinned adapters; "
                "raise max_loras, or remove one of them"
            )

    def send(self) -> None:
        """Write newly assigned slots, after the steps launched so far."""
        for slot, version in list(self.slots.unwritten.items()):
            assert version.adapter is not None, "an adapter with a slot stays on the host"
            self._stacks.write(slot, version.adapter)
            self.slots.written(slot)

    def contents_are_gone(self) -> None:
        """The memory of the slots was dropped: rewrite all of them before the next step."""
        self._stacks.clear()
        self.slots.contents_are_gone()

    # -- the books ---------------------------------------------------------------------------------

    def _of(self, asked: LoRARequest) -> _Known | None:
        """The known adapter, if any. Raises RequestError if its name, number or path belongs to another."""
        known = self._known.get(asked.lora_name)
        owner = self.name_of(asked.lora_int_id)
        if owner is not None and owner != asked.lora_name:
            raise RequestError(f"lora_int_id {asked.lora_int_id} is taken by adapter {owner!r}")
        if known is None:
            return None
        if known.lora_int_id != asked.lora_int_id:
            raise RequestError(
                f"adapter {asked.lora_name!r} is loaded under lora_int_id {known.lora_int_id}, not "
                f"{asked.lora_int_id}"
            )
        if asked.lora_path and not _is_same(asked.lora_path, known.path) and not asked.load_inplace:
            raise RequestError(
                f"the name {asked.lora_name!r} is taken by the adapter from {known.path or 'given tensors'}: "
                "remove that first, or load with load_inplace"
            )
        return known

    def _take_in(self, asked: LoRARequest, path: str, adapter: Adapter) -> None:
        known = self._known.get(asked.lora_name)
        if known is not None and not asked.load_inplace:
            # Its contents were dropped for lack of room, and are read again.
            if adapter.digest != known.digest:
                raise RequestError(
                    f"adapter {asked.lora_name!r} has changed in {path} since it was loaded: load it again "
                    "with load_inplace"
                )
            known.version.adapter = adapter
            return
        self._put(asked, path, adapter)

    def _put(self, asked: LoRARequest, path: str, adapter: Adapter) -> None:
        """Make this the adapter of a name and a number, replacing an earlier one."""
        before = self._known.get(asked.lora_name)
        self._num_versions += 1
        version = AdapterVersion(asked.lora_name, self._num_versions, adapter)
        if before is not None:
            is_pinned = before.version.is_pinned
            self.slots.retire(before.version)
            if is_pinned:
                self.slots.pin(version)
            del self._known[asked.lora_name]
        self._known[asked.lora_name] = _Known(asked.lora_int_id, path, adapter.digest, version)

    def _make_room(self, keep: _Known) -> None:
        """Drop contents that nobody uses and that can be read again, least recently requested first."""
        held = [known for known in self._known.values() if known.version.adapter is not None]
        excess = len(held) - self._max_on_host
        for known in held:
            if excess <= 0:
                return
            version = known.version
            is_needed = version.num_users or version.is_pinned or not known.path or known is keep
            if not is_needed and self.slots.slot_of(version) is None:
                version.adapter = None
                excess -= 1


def _is_same(path: str, other: str) -> bool:
    """Whether both paths lead to the same directory, however written; adapters from tensors have none."""
    return bool(other) and os.path.realpath(path) == os.path.realpath(other)


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
