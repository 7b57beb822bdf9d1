"""How much of a GPU's memory is taken, and by whom."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceMemory:
    """A reading, in bytes; all zero on a CPU."""

    taken: int = 0
    """Of the device, by anybody."""
    reserved: int = 0
    """By torch's allocator, whether in use or not."""
    allocated: int = 0
    """Of these, in use."""

    @classmethod
    def now(cls, device: torch.device) -> DeviceMemory:
        """As it is at this moment."""
        if device.type != "cuda":
            return cls()
        free, total = torch.cuda.mem_get_info(device)
        return cls(total - free, torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device))

    def less(self, earlier: DeviceMemory) -> DeviceMemory:
        """What was added since."""
        return DeviceMemory(
            self.taken - earlier.taken,
            self.reserved - earlier.reserved,
            self.allocated - earlier.allocated,
        )

    @property
    def by_driver(self) -> int:
        """Taken, and not by torch's allocator: what the driver holds."""
        return max(0, self.taken - self.reserved)
