"""The few NCCL functions that a broadcast needs, from the library that torch has loaded."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from .errors import TransferError

ID_BYTES = 128
_BYTES, _FLOATS, _SUM = 1, 7, 0
"""NCCL's codes for types and operations."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


class Communicator:
    """One rank among several, on one GPU."""

    def __init__(self, unique_id: bytes, rank: int, world_size: int, device: torch.device) -> None:
        """Blocks until all ranks have joined."""
        self.device = device
        self._library = _library()
        self._handle = ctypes.c_void_p()
        id = _UniqueId.from_buffer_copy(unique_id)
        with torch.cuda.device(device):
            self._call("ncclCommInitRank", ctypes.byref(self._handle), world_size, id, rank)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Fill `tensor` with the source's bytes, on the current stream; on the source itself, send it."""
        place, count = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
        self._call("ncclBroadcast", place, place, count, _BYTES, source, self._handle, self._stream)

    def sum_floats(self, tensor: Tensor) -> None:
        """Sum float32 over all ranks, in place, on the current stream."""
        place = ctypes.c_void_p(tensor.data_ptr())
        count = ctypes.c_size_t(tensor.numel())
        self._call("ncclAllReduce", place, place, count, _FLOATS, _SUM, self._handle, self._stream)

    def abort(self) -> None:
        """Leave, whatever is under way."""
        self._call("ncclCommAbort", self._handle)

    @property
    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            words = self._library.ncclGetErrorString
            words.restype = ctypes.c_char_p
            raise TransferError(f"{name} failed: {words(code).decode()}")


def new_id() -> bytes:
    """The id for a communicator that others will join."""
    id = _UniqueId()
    if code := _library().ncclGetUniqueId(ctypes.byref(id)):
        raise TransferError(f"ncclGetUniqueId failed: {code}")
    return bytes(id)


def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise TransferError(f"NCCL is not available: {error}") from None
