"""What of a GPU decides how work is divided, however it is called: an H100 and an H200 are the same here."""

import re
from functools import cache
from typing import NamedTuple

import torch

_SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
_RESERVED_BYTES = 1 << 10
"""Of a program's shared memory, by CUDA."""


class Gpu(NamedTuple):
    """A GPU to cut work for."""

    capability: tuple[int, int]
    multiprocessors: int

    def __str__(self) -> str:
        """As tables and their files name it: sm90-132."""
        return "sm{}{}-{}".format(*self.capability, self.multiprocessors)

    @property
    def shared_bytes(self) -> int:
        """The most shared memory of a program; 99 KiB on GPUs for graphics."""
        return _SHARED_KIB.get(self.capability, 99) << 10

    def room_for(self, programs: int) -> int:
        """Shared memory of each of so many programs on a multiprocessor."""
        return (self.shared_bytes + _RESERVED_BYTES) // programs - _RESERVED_BYTES

    def most_programs(self, shared_bytes: int) -> int:
        """That have room on a multiprocessor at a time, if each takes so much."""
        return (self.shared_bytes + _RESERVED_BYTES) // (shared_bytes + _RESERVED_BYTES)

    @classmethod
    def named(cls, name: str) -> "Gpu | None":
        """The one that `str` calls so; None if that is no such name."""
        found = re.fullmatch(r"sm(\d+)(\d)-(\d+)", name)
        return cls((int(found[1]), int(found[2])), int(found[3])) if found else None


H200 = Gpu((9, 0), 132)


@cache
def gpu_of(device: torch.device) -> Gpu:
    """What a device is; kernels that are interpreted work as on the GPU that they were measured on."""
    if device.type != "cuda":
        return H200
    properties = torch.cuda.get_device_properties(device)
    return Gpu(torch.cuda.get_device_capability(device), properties.multi_processor_count)
