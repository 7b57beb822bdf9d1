"""Weights through one buffer that another process fills repeatedly: checkpoint-engine's protocol.

The other process sends requests over a ZeroMQ socket and waits for each answer: first the handle of the
buffer; then, for every filling, a list of what lies where; then None when there is no more; and None again
when it has taken the buffer back. An empty answer means success, any other text is the error; after an error
the other process may continue, or send an exception, which ends the update.

The buffer's contents are copied before the answer, because the buffer is refilled after it. The weights are
written all together, once all have arrived, before the answer to the first None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import TransferError
from .foreign_pickles import Call, Name, described
from .foreign_tensors import cuda_tensor, dtype_of, sizes_of, tensor_of
from .patience import Patience
from .received_weights import Landing
from .wire_formats import Announced, Pairs, cut_out

_LAST_WORD_SECONDS = 30.0
"""To wait for the other process to take its buffer back; older versions do not say so."""


def address_for(device: torch.device, handles: object) -> str:
    """The address at which the sender for this device listens; `handles` maps device names to addresses."""
    own = "cpu" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
    known = handles if isinstance(handles, Mapping) else {}
    found = known.get(own, known.get(f"GPU-{own}"))
    if not isinstance(found, str):
        names = ", ".join(map(str, known)) or "nothing"
        raise TransferError(f"zmq_handles has no address for this engine's device {own}, only for {names}")
    if not found.startswith("ipc://"):
        raise TransferError(
            f"memory can only be shared on one machine: an address must begin with ipc://, not {found!r}"
        )
    return found


class SharedBuffer:
    """One update through it. Between two calls the other process waits for an answer."""

    def __init__(self, address: str, device: torch.device, patience: Patience, most_bytes: int) -> None:
        """Does not connect yet. More than `most_bytes` are refused."""
        self._address, self._device, self._patience = address, device, patience
        self._most_bytes = most_bytes
        self._socket: Any = None

    def received(self) -> Pairs:
        """All weights, leaving the last request unanswered. An error is sent in the next answer, and raised
        when the other process has stopped."""
        try:
            import zmq
        except ModuleNotFoundError as error:
            raise TransferError(f"{error.name} is missing: pip install 'ostinato[server]'") from error
        self._socket = zmq.Context.instance().socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(self._address)
        filling = _Fillings(self._device, self._most_bytes)
        self._hear(filling.open)
        while True:
            self._socket.send_string(filling.problem)
            try:
                if self._hear(filling.add):
                    break
            except TransferError as error:
                raise filling.error or error from None
        if filling.error is not None:
            self.finish(filling.problem)
            raise filling.error
        return filling.found

    def finish(self, error: str = "") -> None:
        """Answer the last request: the weights are written, or why not. The buffer is released first."""
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()
        self._socket.send_string(error)
        if self._socket.poll(1000 * min(_LAST_WORD_SECONDS, self._patience.seconds)):
            self._socket.recv()
            self._socket.send(b"")

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()

    def _hear(self, take: Callable[[Any], None]) -> bool:
        """Wait for a message. True if it says that there is no more; otherwise `take` gets it."""
        what = f"a message from the trainer at {self._address}"
        self._patience.until(what, lambda seconds: bool(self._socket.poll(1000 * seconds)))
        said = described(self._socket.recv())
        if said is not None:
            take(said)
        return said is None


class _Fillings:
    """What has arrived so far, and the first error in it."""

    def __init__(self, device: torch.device, most_bytes: int) -> None:
        self._device, self._most_bytes = device, most_bytes
        self._landing = Landing(device, most_bytes)
        self._buffer: Tensor | None = None
        self.found: Pairs = []
        self.error: Exception | None = None

    @property
    def problem(self) -> str:
        """The error as text; empty if there is none."""
        return "" if self.error is None else f"{type(self.error).__name__}: {self.error}"

    def open(self, handle: object) -> None:
        """The first message: where the buffer is."""
        try:
            self._buffer = _buffer_of(handle, self._device)
        except Exception as error:
            self.error = error

    def add(self, entries: object) -> None:
        """The buffer was filled with these entries."""
        if self.error is not None or self._buffer is None:
            return
        try:
            parts = list(_parts(entries, self._buffer))
            if sum(part.nbytes for _, part in (*self.found, *parts)) > self._most_bytes:
                raise TransferError(
                    f"more than {self._most_bytes:,} bytes were sent, more than any update of this model has"
                )
            self.found += [(name, self._landing.copy(part)) for name, part in parts]
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        except Exception as error:
            self.error = error


def _buffer_of(handle: object, device: torch.device) -> Tensor:
    match handle:
        case (Name() as function, tuple() as arguments):
            call = Call(function, arguments)
        case _:
            raise TransferError(
                "the first message must be the handle of a buffer, as torch's reduce_tensor makes it"
            )
    if device.type == "cuda" and len(arguments) == 15:
        # The index is the sender's, who may see other devices than we do.
        buffer = cuda_tensor([*arguments[:6], device.index or 0, *arguments[7:]])
    else:
        buffer = tensor_of(call, "the buffer")
    if buffer.dtype != torch.uint8 or buffer.ndim != 1:
        raise TransferError(
            f"the buffer must be one-dimensional and of torch.uint8, not {buffer.dtype} {list(buffer.shape)}"
        )
    return buffer


def _parts(entries: object, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    if not isinstance(entries, list):
        raise TransferError(f"the contents of a buffer must be a list, not {type(entries).__name__}")
    for entry in entries:
        match entry:
            case {"name": str() as name, "shape": shape, "dtype": dtype, "offset": offset}:
                one = Announced(name, dtype_of(dtype), sizes_of(shape))
                [begin] = sizes_of((offset,))
                yield name, cut_out(buffer, begin, begin + one.num_bytes, one)
            case _:
                raise TransferError("an entry of a buffer must have a name, a shape, a dtype and an offset")
