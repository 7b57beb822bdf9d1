"""Receiving weights from a group, alongside the engine's steps, before any of them is used.

Whatever was announced is received as announced, even if it will be refused: the trainer is in the middle of
a broadcast, and all its ranks would hang if one receiver were missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .broadcast_groups import BroadcastGroup
from .errors import TransferError
from .wire_formats import Announced, Pairs, packed_tensors

_SPARE = 512 * 2**20
"""Bytes of GPU memory left free for others."""


class Landing:
    """Where received weights wait for the rest: on the device if all of them fit, else on the host."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._to_host = device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < num_bytes + _SPARE

    def keep(self, tensor: Tensor) -> Tensor:
        """The tensor in its place; nobody else writes to `tensor`."""
        return tensor.cpu() if self._to_host else tensor

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy in its place, because the owner of `tensor` may write to it again."""
        return tensor.to("cpu", copy=True) if self._to_host else tensor.clone()


def received(
    group: BroadcastGroup, entries: Sequence[Announced], source: int, packed_bytes: int | None
) -> Pairs:
    """What rank `source` broadcasts: tensor by tensor, or packed into chunks of bytes, each closed once it
    exceeds `packed_bytes`."""
    landing = Landing(group.device, sum(one.num_bytes for one in entries))
    found: Pairs = []
    with group.arriving():
        for chunk in _chunks(entries, packed_bytes):
            if packed_bytes is None:
                [one] = chunk
                tensor = torch.empty(one.shape, dtype=one.dtype, device=group.device)
                group.receive(tensor, source)
                found.append((one.name, landing.keep(tensor)))
            else:
                size = sum(one.num_bytes for one in chunk)
                flat = torch.empty(size, dtype=torch.uint8, device=group.device)
                group.receive(flat, source)
                found += packed_tensors(landing.keep(flat), chunk)
    return found


def _chunks(entries: Sequence[Announced], packed_bytes: int | None) -> Iterator[list[Announced]]:
    """Chunks exactly as the sender makes them: both sides know nothing but the size."""
    chunk: list[Announced] = []
    size = 0
    for one in entries:
        chunk.append(one)
        size += one.num_bytes
        if packed_bytes is None or size > packed_bytes:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def check_amount(entries: Sequence[Announced], most: int) -> None:
    """Raises TransferError for more bytes than any update of this model has."""
    wanted = sum(one.num_bytes for one in entries)
    if wanted > most:
        raise TransferError(
            f"{wanted:,} bytes were announced, but this model's weights take at most {most:,}"
        )
