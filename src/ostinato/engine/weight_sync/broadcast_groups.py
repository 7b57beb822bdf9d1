"""Process groups through which a trainer broadcasts: torch's own, gloo or NCCL.

Note [The same group]
A trainer makes its group with torch.distributed: either by `init_process_group` or by the variant that
SGLang's clients derived from it. Both sides find each other by keys in a store; the keys contain the group's
name, twice, and a device. Here the group is built from the same parts but without torch's registry, because
this process may have groups of its own, or none.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import TransferError
from .patience import Patience

BACKENDS = ("gloo", "nccl")
DEFAULT_NAMES = ("default_pg", "0")
"""The name of the group that `torch.distributed.init_process_group` makes first."""
_Found = TypeVar("_Found")
_LONG = datetime.timedelta(days=1)
"""For torch's own NCCL watchdog, which kills the whole process: our limit must expire first."""


class BroadcastGroup(Protocol):
    """What weights are received through."""

    @property
    def device(self) -> torch.device:
        """Where they arrive."""

    def receive(self, tensor: Tensor, source: int) -> None:
        """Wait for a broadcast and write it into `tensor`."""

    def arriving(self) -> AbstractContextManager[Any]:
        """Allocate what will be received inside: steps must not wait for a trainer on their own stream."""

    def abort(self) -> None:
        """Leave; transfers under way are abandoned."""


@dataclass(frozen=True)
class Place:
    """Where a group meets, and this process's rank in it."""

    address: str
    port: int
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if not isinstance(self.address, str) or not self.address:
            raise TransferError(f"master_address must be a host name or an address, not {self.address!r}")
        for name, least in (("port", 1), ("rank", 0), ("world_size", 2)):
            given = getattr(self, name)
            if not isinstance(given, int) or isinstance(given, bool) or given < least:
                raise TransferError(f"{name} must be an integer of at least {least}, not {given!r}")
        if self.port >= 65536:
            raise TransferError(f"port must be below 65536, not {self.port}")
        if not 0 < self.rank < self.world_size:
            raise TransferError(
                f"rank {self.rank} of {self.world_size}: the trainer is rank 0, so rank_offset must be from "
                "1 to world_size - 1"
            )


class TorchGroup:
    """A process group of torch, unusable after the first failure."""

    def __init__(
        self, place: Place, names: tuple[str, str], backend: str, device: torch.device, patience: Patience
    ) -> None:
        """Meet the others. Raises TransferTimeout if they do not come. `names`: see Note [The same group]."""
        if backend not in BACKENDS:
            raise TransferError(f"unknown backend {backend!r}: use {' or '.join(BACKENDS)}")
        if backend == "nccl" and device.type != "cuda":
            raise TransferError("NCCL needs a GPU, and this engine runs on a CPU: use gloo")
        if not dist.is_available():
            raise TransferError("this build of torch has no torch.distributed")
        self.device = device if backend == "nccl" else torch.device("cpu")
        self._stream = side_stream(self.device)
        self._patience = patience
        what = f"the rendezvous of group {names[1]!r} at {place.address}:{place.port}"
        self._group = awaited(patience, what, lambda: _made(place, names, backend, patience.seconds))

    def receive(self, tensor: Tensor, source: int) -> None:
        """Wait for a broadcast and write it into `tensor`."""
        awaited(self._patience, "a broadcast", lambda: self._receive(tensor, source))

    def _receive(self, tensor: Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        with self.arriving():
            self._group.broadcast([tensor], options).wait()
        if self._stream is not None:
            self._stream.synchronize()

    def arriving(self) -> AbstractContextManager[Any]:
        """Allocate what will be received inside."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def abort(self) -> None:
        """Leave; transfers under way are abandoned."""
        # gloo cannot be aborted: a waiting thread drops the group when its own time limit expires.
        if self.device.type == "cuda":
            awaited(self._patience, "leaving a group", self._group.abort)


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream that nothing else computes on; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _made(place: Place, names: tuple[str, str], backend: str, seconds: float) -> Any:
    limit = datetime.timedelta(seconds=seconds)
    address = f"[{place.address}]" if ":" in place.address else place.address
    meeting = dist.rendezvous(f"tcp://{address}:{place.port}", place.rank, place.world_size, timeout=limit)
    store, rank, size = next(iter(meeting))
    store.set_timeout(limit)
    device = next(iter(dist.BackendConfig(dist.Backend(backend)).get_device_backend_map()))
    for prefix in (names[0], f"{names[1]}/", f"{device}/"):
        store = dist.PrefixStore(prefix, store)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout=limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _LONG
    return dist.ProcessGroupNCCL(store, rank, size, options)


def awaited(patience: Patience, what: str, function: Callable[[], _Found]) -> _Found:
    """Call `function` within the time limit. Whatever torch.distributed raises becomes a TransferError: the
    cause is the other side, or what it told us."""
    try:
        return patience.within(what, function)
    except (RuntimeError, ValueError, OSError) as error:
        if isinstance(error, TransferError):
            raise
        raise TransferError(f"{what} failed: {error}") from error
