"""Weights on their way: what a group brings, beside the engine's steps, before any of it is used.

Whatever was announced is received as it was announced, also if it will be refused: the trainer is in the
middle of a broadcast, and would hang with all its ranks if somebody did not come to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .broadcast_groups import BroadcastGroup
from .errors import TransferError
from .wire_formats import Announced, Pairs, packed_tensors

_SPARE = 512 * 2**20
"""Bytes of a GPU that are left to others."""


class Landing:
    """Where weights wait for the others: on the device if there is room for all, else on the host."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._to_host = device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < num_bytes + _SPARE

    def keep(self, tensor: Tensor) -> Tensor:
        """The same, where it stays; `tensor` is on its way and nobody else writes to it."""
        return tensor.cpu() if self._to_host else tensor

    def copy(self, tensor: Tensor) -> Tensor:
        """The same, where it stays, while its owner may write to `tensor` again."""
        return tensor.to("cpu", copy=True) if self._to_host else tensor.clone()


def received(
    group: BroadcastGroup, entries: Sequence[Announced], source: int, packed_bytes: int | None
) -> Pairs:
    """What rank `source` broadcasts: each tensor by itself, or as bytes, so many at a time that they are more
    than `packed_bytes`."""
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
    """Cut as the sender does, which is told nothing else than the size."""
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
    """TransferError for more than any update of this model has."""
    wanted = sum(one.num_bytes for one in entries)
    if wanted > most:
        raise TransferError(
            f"{wanted:,} bytes were announced, and this model's weights take {most:,} at most"
        )
