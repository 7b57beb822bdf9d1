"""A group that the engine hosts: it is rank 0 of vLLM's stateless group and listens for the others.

Note [Two ends of a store]
The store that listens is one object; the group reads and writes through another. When the first is dropped,
everyone waiting on the second gets an error at once. So giving up a rendezvous also ends threads that nothing
else can stop, and frees the port.
"""

from __future__ import annotations

import datetime
import socket
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .broadcast_groups import Place, awaited, side_stream
from .errors import TransferError
from .patience import Patience
from .stateless_groups import PyNcclCommunicator, StatelessProcessGroup


class KeptGroup:
    """What TRL's `VLLMClient` sends through: NCCL on a GPU, gloo on a CPU."""

    def __init__(self, trainer: Place, device: torch.device, patience: Patience) -> None:
        """Listen. `trainer`: the address, and the rank that the trainer will have."""
        self.device, self.source, self.port = device, trainer.rank, trainer.port
        self._what = f"the rendezvous at {trainer.address}:{trainer.port}"
        self._stream = side_stream(device)
        self._patience = patience
        self._communicator: PyNcclCommunicator | None = None
        self._store: dist.Store | None
        self._store, self._group = awaited(patience, self._what, lambda: _listening(trainer, patience))

    @property
    def has_met(self) -> bool:
        """Whether the trainer has come."""
        return self._communicator is not None

    def meet(self) -> None:
        """Wait for the trainer. Raises TransferTimeout if it does not come."""
        self._communicator = awaited(self._patience, self._what, self._met)

    def _met(self) -> PyNcclCommunicator:
        with self.arriving():
            return PyNcclCommunicator(self._group, self.device)

    def receive(self, tensor: Tensor, source: int) -> None:
        """Wait for a broadcast and write it into `tensor`; the trainer waits until every rank has it."""
        awaited(self._patience, "a broadcast", lambda: self._receive(tensor, source))

    def _receive(self, tensor: Tensor, source: int) -> None:
        if self._communicator is None:
            raise TransferError(f"{self._what} has not taken place yet")
        with self.arriving():
            self._communicator.broadcast(tensor, source)
        if self._stream is not None:
            self._stream.synchronize()
        self._group.barrier(self._patience.seconds)

    def arriving(self) -> AbstractContextManager[Any]:
        """Allocate what will be received inside."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def abort(self) -> None:
        """Leave and stop listening; see Note [Two ends of a store]."""
        self._store = None
        communicator, self._communicator = self._communicator, None  # NCCL allows leaving only once
        if communicator is not None:
            awaited(self._patience, "leaving a group", communicator.destroy)


def _listening(place: Place, patience: Patience) -> tuple[dist.Store, StatelessProcessGroup]:
    limit = datetime.timedelta(seconds=patience.seconds)
    family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
    # On its own the store would listen on every address.
    with socket.create_server((place.address, place.port), family=family) as listener:
        options: dict[str, Any] = {"timeout": limit, "wait_for_workers": False, "use_libuv": False}
        at = (place.address, place.port, place.world_size)
        store = dist.TCPStore(*at, True, **options, master_listen_fd=listener.detach())
        own = dist.TCPStore(*at, False, **options)
    return store, StatelessProcessGroup(0, place.world_size, own)
