"""The trainer's end of a weight transfer, for trainers that call vLLM's functions: rank 0 of the group."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..weight_sync.broadcast_groups import DEFAULT_NAMES
from ..weight_sync.stateless_groups import PyNcclCommunicator, StatelessProcessGroup

_PACKED_BYTES = 2**30
"""vLLM's default; sender and receiver cut the data by it."""
_MEETING = ("master_address", "master_port", "world_size")
_LIMIT = datetime.timedelta(seconds=300)


class _Sender(Protocol):
    def broadcast(self, tensor: Tensor, src: int) -> None: ...


class _GlooSender:
    """Rank 0 of the group that an engine on a CPU joins; vLLM has no counterpart."""

    def __init__(self, address: str, port: int, world_size: int) -> None:
        place = f"[{address}]" if ":" in address else address
        meeting = dist.rendezvous(f"tcp://{place}:{port}", 0, world_size, timeout=_LIMIT)
        store, rank, size = next(iter(meeting))
        for prefix in (DEFAULT_NAMES[0], f"{DEFAULT_NAMES[1]}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        self.group = StatelessProcessGroup(rank, size, store)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=_LIMIT)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._gloo.broadcast([tensor], options).wait()


def trainer_init(init_info: object) -> PyNcclCommunicator | _GlooSender:
    """Join the engines, which get the same `init_info`; uses the current GPU, or gloo without one."""
    address, port, world_size = (_field(init_info, name) for name in _MEETING)
    if not torch.cuda.is_available():
        return _GlooSender(address, port, world_size)
    group = StatelessProcessGroup.create(address, port, 0, world_size)
    return PyNcclCommunicator(group, torch.cuda.current_device())


def _field(given: object, name: str) -> Any:
    return given[name] if isinstance(given, Mapping) else getattr(given, name)


def packed_nccl_broadcast_producer(
    iterator: Iterator[tuple[str, Tensor]],
    group: _Sender,
    src: int,
    post_iter_func: Callable[[tuple[str, Tensor]], Tensor],
    buffer_size_bytes: int = _PACKED_BYTES,
) -> None:
    """Send named tensors as bytes, in batches that each end once they exceed `buffer_size_bytes`. Returns
    when everything is sent."""
    for flat in _packed(map(post_iter_func, iterator), buffer_size_bytes):
        group.broadcast(flat, src=src)
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def _packed(tensors: Iterator[Tensor], limit: int) -> Iterator[Tensor]:
    parts: list[Tensor] = []
    size = 0
    for tensor in tensors:
        parts.append(tensor.detach().contiguous().view(-1).view(torch.uint8))
        size += parts[-1].numel()
        if size > limit:
            yield torch.cat(parts)
            parts, size = [], 0
    if parts:
        yield torch.cat(parts)
