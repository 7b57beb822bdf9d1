"""Readings of a GPU's memory, and the plan for what an engine takes besides weights and KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ostinato.graphs import GraphKey


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


OUTSIDE_GRAPHS = 512 << 20
"""Kept free on a GPU for steps without a graph, logprobs of whole prompts and the like."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes. 0 or None if not measured: on a CPU; for graphs, also if the number of pages is given."""

    buffers: int = 0
    """Rows of requests, inputs, logits, sampling state: allocated after the KV cache."""
    workspace: int = 0
    """What libraries took while kernels were tried out; they keep it."""
    activations: int | None = None
    """Size of the shared pool of all graphs; None: not rehearsed."""
    executables: int = 0
    """What the driver will take for all graphs, beyond what it kept of the rehearsal's."""
    rungs: Sequence[Mapping[GraphKey, int]] = field(default_factory=tuple)
    """How much each graph adds to the pool: graphs of the model, and of each kind of sampling."""

    @property
    def to_come(self) -> int:
        """How much must stay free when the KV cache is allocated."""
        if self.activations is None:
            return 0
        return self.buffers + self.activations + self.executables + OUTSIDE_GRAPHS

    @property
    def predictions(self) -> dict[str, int]:
        """With the names of `LLM.memory_report`."""
        if self.activations is None:
            return {}
        return {
            "predicted_activations": self.activations,
            "predicted_workspace": self.workspace,
            "predicted_graphs": self.executables,
        }
