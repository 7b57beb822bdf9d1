"""What of a GPU decides how work is divided, however it is called: an H100 and an H200 are the same here."""

import re
from functools import cache
from typing import NamedTuple

import torch

_SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
_RESERVED_BYTES = 1 << 10
"""Of a CTA's shared memory, by CUDA."""


class Gpu(NamedTuple):
    """A GPU to cut work for."""

    capability: tuple[int, int]
    multiprocessors: int

    def __str__(self) -> str:
        """Returns the name that tables and their files use: sm90-132."""
        return "sm{}{}-{}".format(*self.capability, self.multiprocessors)

    @property
    def shared_bytes(self) -> int:
        """Returns the most shared memory of a CTA; 99 KiB on GPUs for graphics."""
        return _SHARED_KIB.get(self.capability, 99) << 10

    def room_for(self, programs: int) -> int:
        """Returns the shared memory of each of so many CTAs on an SM."""
        return (self.shared_bytes + _RESERVED_BYTES) // programs - _RESERVED_BYTES

    def most_programs(self, shared_bytes: int) -> int:
        """Returns how many CTAs that take so much fit on an SM."""
        return (self.shared_bytes + _RESERVED_BYTES) // (shared_bytes + _RESERVED_BYTES)

    @classmethod
    def named(cls, name: str) -> "Gpu | None":
        """Returns the GPU of a name made by `str`; None if it is no such name."""
        found = re.fullmatch(r"sm(\d+)(\d)-(\d+)", name)
        return cls((int(found[1]), int(found[2])), int(found[3])) if found else None


H200 = Gpu((9, 0), 132)


@cache
def gpu_of(device: torch.device) -> Gpu:
    """Returns the GPU of a device; for interpreted kernels the one that they were measured on."""
    if device.type != "cuda":
        return H200
    properties = torch.cuda.get_device_properties(device)
    return Gpu(torch.cuda.get_device_capability(device), properties.multi_processor_count)
