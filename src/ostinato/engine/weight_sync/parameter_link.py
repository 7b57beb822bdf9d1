"""Weights as TRL's own server takes them: one parameter at a time, each announced before it is sent.

The engine hosts the group as rank 0; the trainer is the last rank and the source. It starts to send as soon
as its request is answered. So each request has two halves here: one that refuses what cannot work, while the
trainer still reads the answer, and one that waits for the trainer. An error in the second half reaches nobody
unless the caller keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ostinato.models.weight_update import WeightPlaces

from ..sleeping.served_weights import WeightsReport
from .broadcast_groups import Place
from .errors import TransferError
from .kept_group import KeptGroup
from .received_weights import received
from .trainer_link import Operation, TrainerLink, left
from .wire_formats import Pairs, announced

_WORLD_SIZE = 2
"""This engine and the trainer's first process."""


class ParameterLink:
    """The parameter-by-parameter link of one engine."""

    def __init__(self, link: TrainerLink) -> None:
        self._link = link
        self._group: KeptGroup | None = None
        self._awaits_trainer = False
        self._places = WeightPlaces(link.model)

    # -- the group ---------------------------------------------------------------------------------

    def listen(self, address: str, port: int, world_size: int, device_uuid: str | None) -> Operation[None]:
        """Listen for a trainer, whose GPU has this UUID. An earlier group is left once the new one listens,
        or before if both use the same port."""
        if world_size != _WORLD_SIZE:
            raise TransferError(
                f"world_size must be {_WORLD_SIZE}, this engine and the trainer, not {world_size!r}"
            )
        trainer = Place(address, port, world_size - 1, world_size)
        device = self._link.device
        if device.type == "cuda" and device_uuid == str(torch.cuda.get_device_properties(device).uuid):
            raise TransferError(
                f"the trainer is on this engine's GPU {device_uuid}: NCCL needs a GPU for each rank"
            )
        if self._awaits_trainer:
            yield self._link.give_up_others
        with self._link.alone():
            if self._group is not None and self._group.port == port:
                yield from self.leave()
            made = yield lambda: KeptGroup(trainer, device, self._link.patience)
            yield from self.leave()
            self._group = made

    def meet(self) -> Operation[None]:
        """Wait for the trainer."""
        group = self._known_group()
        with self._alone():
            yield from self._awaited(group, group.meet)

    def leave(self) -> Operation[None]:
        """Leave the group, if there is one; if someone is waiting in it, make them stop first."""
        if self._awaits_trainer:
            yield self._link.give_up_others
        group, self._group = self._group, None
        if group is not None:
            yield lambda: left(group)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._link.alone():
            self._awaits_trainer = True
            try:
                yield
            finally:
                self._awaits_trainer = False

    # -- parameters --------------------------------------------------------------------------------

    def check(self, weight: object, dtype: object, shape: object) -> None:
        """Raises TransferError or WeightsError for a parameter that must not be sent."""
        if not self._known_group().has_met:
            raise TransferError("the trainer has not joined the group yet")
        [one] = announced([weight], [dtype], [shape])
        if not self._places.are_current:
            self._places = WeightPlaces(self._link.model)
        place = self._places.name_of(one.name)
        if place is None:
            self._link.check_amount([one])
        else:
            self._places.checked(place, torch.empty((), dtype=one.dtype).expand(one.shape))

    def receive(self, weight: object, dtype: object, shape: object) -> Operation[WeightsReport]:
        """Wait for a parameter and write it."""
        self.check(weight, dtype, shape)
        group, entries = self._known_group(), announced([weight], [dtype], [shape])
        with self._alone():
            pairs: Pairs = yield from self._awaited(
                group, lambda: received(group, entries, group.source, None)
            )
            return self._link.apply(pairs, None)

    def _awaited(self, group: KeptGroup, wait: Callable[[], Any]) -> Operation[Any]:
        try:
            return (yield wait)
        except Exception:
            # The trainer's position is unknown: its next broadcast could be mistaken for this one.
            yield lambda: self._drop(group)
            raise

    def _known_group(self) -> KeptGroup:
        if self._group is None:
            raise TransferError("there is no communicator: call /init_communicator/ first")
        return self._group

    def _drop(self, group: KeptGroup) -> None:
        if self._group is group:
            self._group = None
        left(group)
