"""How much of a GPU's memory is taken: in all, and by torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceMemory:
    """A reading, in bytes; all 0 on a CPU."""

    taken: int = 0
    """In use on the device, by any process."""
    reserved: int = 0
    """Held by torch's allocator, in use or not."""
    allocated: int = 0
    """The part of `reserved` that is in use."""

    @classmethod
    def now(cls, device: torch.device) -> DeviceMemory:
        """The present state."""
        if device.type != "cuda":
            return cls()
        free, total = torch.cuda.mem_get_info(device)
        return cls(total - free, torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device))

    def less(self, earlier: DeviceMemory) -> DeviceMemory:
        """What was added since `earlier`."""
        return DeviceMemory(
            self.taken - earlier.taken,
            self.reserved - earlier.reserved,
            self.allocated - earlier.allocated,
        )

    @property
    def by_driver(self) -> int:
        """Taken, but not by torch's allocator: held by the driver."""
        return max(0, self.taken - self.reserved)
