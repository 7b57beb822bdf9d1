"""vLLM's groups, for trainers that make them themselves: `StatelessProcessGroup`, `PyNcclCommunicator`.

On GPUs they work with vLLM's own classes, as either end. On a CPU, where vLLM's are disabled, the
communicator uses gloo and works only with another one of ours.
"""

from __future__ import annotations

import datetime
import uuid
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import TransferError
from .nccl_library import Communicator, new_id
from .stateless_nccl import pickled_id, pickled_text, text_of, unique_id


class StatelessProcessGroup:
    """Ranks that meet in a store hosted by rank 0."""

    def __init__(self, rank: int, world_size: int, store: dist.Store) -> None:
        self.rank, self.world_size, self.store = rank, world_size, store
        self._num_sent = 0
        self._num_received = [0] * world_size

    @staticmethod
    def create(
        host: str, port: int, rank: int, world_size: int, *, store_timeout: float = 300
    ) -> StatelessProcessGroup:
        """Wait for rank 0; rank 0 itself waits for nobody."""
        limit = datetime.timedelta(seconds=store_timeout)
        is_first = rank == 0
        store = dist.TCPStore(
            host, port, world_size, is_first, limit, wait_for_workers=not is_first, use_libuv=False
        )
        return StatelessProcessGroup(rank, world_size, store)

    def sent(self, pickled: bytes) -> str:
        """Leave something for all other ranks; returns its key."""
        key = f"broadcast_from/{self.rank}/{self._num_sent}"
        self.store.set(key, pickled)
        self._num_sent += 1
        return key

    def received(self, source: int) -> bytes:
        """The next item that rank `source` left for all."""
        found: bytes = self.store.get(f"broadcast_from/{source}/{self._num_received[source]}")
        self._num_received[source] += 1
        return found

    def barrier(self, timeout: float = 30.0) -> None:
        """Wait until all ranks have arrived; rank 0 also until all have left, then it deletes the keys."""
        limit = datetime.timedelta(seconds=timeout)
        if self.rank:
            name = text_of(self.received(0))
            self._wait_at("arrival", name, limit)
            self.store.set(f"departure_{name}_{self.rank}", b"1")
            return
        name = f"barrier_{uuid.uuid4()}"
        used = [self.sent(pickled_text(name))]
        for phase in ("arrival", "departure"):
            used += self._wait_at(phase, name, limit)
        for key in used:
            self.store.delete_key(key)

    def _wait_at(self, phase: str, name: str, limit: datetime.timedelta) -> list[str]:
        self.store.set(f"{phase}_{name}_{self.rank}", b"1")
        keys = [f"{phase}_{name}_{rank}" for rank in range(self.world_size)]
        self.store.wait(keys, limit)
        return keys


class PyNcclCommunicator:
    """Broadcasts between the ranks of a group, each on its own GPU."""

    def __init__(self, group: StatelessProcessGroup, device: int | str | torch.device) -> None:
        """Wait for all ranks."""
        self.group, self.rank, self.world_size = group, group.rank, group.world_size
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        self.available, self.disabled = True, False
        if self.device.type != "cuda":
            store = dist.PrefixStore("gloo", group.store)
            limit = datetime.timedelta(seconds=300)
            self._gloo: Any = dist.ProcessGroupGloo(store, self.rank, self.world_size, timeout=limit)
            return
        if self.rank == 0:
            id = new_id()
            group.sent(pickled_id(id))
        else:
            id = unique_id(group.received(0))
        self._communicator = Communicator(id, self.rank, self.world_size, self.device)
        self._communicator.sum_floats(torch.zeros(1, dtype=torch.float32, device=self.device))
        torch.cuda.current_stream(self.device).synchronize()

    def broadcast(self, tensor: Tensor, src: int, stream: torch.cuda.Stream | None = None) -> None:
        """Send `tensor`, or fill it with the source's; on a GPU without waiting for completion."""
        if tensor.device.type != self.device.type or not tensor.is_contiguous():
            raise TransferError(
                f"a broadcast needs a contiguous tensor on {self.device}, got one on {tensor.device}"
            )
        if self.device.type != "cuda":
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = src, 0
            self._gloo.broadcast([tensor], options).wait()
            return
        with torch.cuda.stream(stream or torch.cuda.current_stream(self.device)):
            self._communicator.broadcast(tensor, src)

    def destroy(self) -> None:
        """Leave."""
        if self.device.type == "cuda":
            self._communicator.abort()
