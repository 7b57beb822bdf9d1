"""What an engine will take on the device beside weights and KV cache, as a rehearsal has found out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ostinato.graphs import GraphKey

OUTSIDE_GRAPHS = 512 << 20
"""Kept free on a GPU for steps without a graph, logprobs of whole prompts and the like."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes. Nothing where nobody asks: on a CPU; of the graphs, where the number of pages is given."""

    buffers: int = 0
    """Rows of requests, inputs, logits, states of sampling: allocated behind the KV cache."""
    workspace: int = 0
    """What libraries took while kernels were tried out, and keep."""
    activations: int | None = None
    """The pool of all graphs; None: not rehearsed."""
    executables: int = 0
    """What the driver will take for all graphs, beside what it has kept of those of the rehearsal."""
    rungs: Sequence[Mapping[GraphKey, int]] = field(default_factory=tuple)
    """By how much each graph makes the pool grow: of the model, and of each kind of sampling."""

    @property
    def to_come(self) -> int:
        """What has to stay free when the KV cache is allocated."""
        if self.activations is None:
            return 0
        return self.buffers + self.activations + self.executables + OUTSIDE_GRAPHS

    @property
    def predictions(self) -> dict[str, int]:
        """In the words of `LLM.memory_report`."""
        if self.activations is None:
            return {}
        return {
            "predicted_activations": self.activations,
            "predicted_workspace": self.workspace,
            "predicted_graphs": self.executables,
        }
