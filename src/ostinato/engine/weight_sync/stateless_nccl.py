"""Groups as vLLM's trainers make them: a store to meet in, and NCCL without torch.distributed.

Rank 0, the trainer, hosts a TCPStore and leaves NCCL's id in it, pickled; then every rank joins and all sum
one number (vLLM's `StatelessProcessGroup` and `PyNcclCommunicator`).
"""

from __future__ import annotations

import datetime
import pickle
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .broadcast_groups import Place, awaited, side_stream
from .errors import TransferError
from .foreign_pickles import Call, Name, described
from .nccl_library import ID_BYTES, Communicator
from .patience import Patience

_ID_KEY = "broadcast_from/0/0"
_ID_NAMES = {
    (each.module, each.name): each
    for each in (
        Name("_ctypes", "_unpickle"),
        Name("vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId"),
    )
}


class StatelessGroup:
    """What vLLM's `NCCLTrainerWeightTransferEngine` sends through."""

    def __init__(self, place: Place, device: torch.device, patience: Patience) -> None:
        """Meet the others. Raises TransferTimeout if they do not come."""
        if device.type != "cuda":
            raise TransferError("NCCL needs a GPU, and this engine runs on a CPU")
        self.device = device
        self._stream = side_stream(device)
        self._patience = patience
        what = f"the rendezvous at {place.address}:{place.port}"
        self._communicator = awaited(patience, what, lambda: self._joined(place))

    def _joined(self, place: Place) -> Communicator:
        store = dist.TCPStore(
            place.address,
            place.port,
            world_size=place.world_size,
            is_master=False,
            timeout=datetime.timedelta(seconds=self._patience.seconds),
            use_libuv=False,
        )
        communicator = Communicator(unique_id(store.get(_ID_KEY)), place.rank, place.world_size, self.device)
        with self.arriving():
            communicator.sum_floats(torch.zeros(1, dtype=torch.float32, device=self.device))
            torch.cuda.current_stream(self.device).synchronize()
        self._store = store
        return communicator

    def receive(self, tensor: Tensor, source: int) -> None:
        """Wait for a broadcast and write it into `tensor`."""
        awaited(self._patience, "a broadcast", lambda: self._receive(tensor, source))

    def _receive(self, tensor: Tensor, source: int) -> None:
        with self.arriving():
            self._communicator.broadcast(tensor, source)
            torch.cuda.current_stream(self.device).synchronize()

    def arriving(self) -> AbstractContextManager[Any]:
        """Allocate what will be received inside."""
        return torch.cuda.stream(self._stream)

    def abort(self) -> None:
        """Leave; transfers under way are abandoned."""
        awaited(self._patience, "leaving a group", self._communicator.abort)


def unique_id(pickled: bytes) -> bytes:
    """NCCL's id as vLLM leaves it in the store: the bytes of a ctypes structure."""
    match described(pickled, _ID_NAMES):
        case Call(Name(_, "_unpickle"), (Name(_, "ncclUniqueId"), (_, bytes() as found))) if (
            len(found) == ID_BYTES
        ):
            return found
    raise TransferError("what the trainer left in the store is not an NCCL id")


def pickled_id(id: bytes) -> bytes:
    """The inverse, for a trainer's vLLM to read."""
    return (
        b"\x80\x04"
        + b"".join(f"c{module}\n{name}\n".encode() for module, name in _ID_NAMES)
        + (b"}C\x80" + id + b"\x86\x86R.")
    )


def text_of(pickled: bytes) -> str:
    """A string that another rank has left."""
    found = described(pickled, {})
    if not isinstance(found, str):
        raise TransferError("what another rank left in the store is not a string")
    return found


def pickled_text(text: str) -> bytes:
    """The inverse."""
    return pickle.dumps(text)
