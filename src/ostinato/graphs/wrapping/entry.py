"""What a wrapper was asked for, and what it keeps for each kind of call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..dispatching.ladder import Ladder
from ..dispatching.mode import GraphMode
from ..inputs.buffers import Batch
from ..inputs.fields import Scalar
from ..options import CaptureOptions
from ..results import Results
from ..runner import CudaGraphRunner
from .first_run import FirstRun
from .in_place import InPlace
from .no_gradients import Differentiable
from .reached import Reached
from .signature import Signature


@dataclass(frozen=True)
class Settings:
    """The settings of a wrapper and of its copies; see `graphed`."""

    ladder: Ladder
    batch_dim: int | Mapping[str, int]
    mode: GraphMode
    shared: Sequence[str]
    pads: Mapping[str, Scalar]
    options: CaptureOptions
    compile_up_to: int
    results: Results
    debug: bool

    def for_trial(self) -> "Settings":
        """The same for graphs that are made to see whether they can be."""
        mode = GraphMode.FULL if self.mode is GraphMode.NONE else self.mode
        return replace(self, mode=mode, options=replace(self.options, strict=False))


@dataclass
class Entry:
    """The graphs of one call signature, and the surroundings they were captured in."""

    signature: Signature
    runner: CudaGraphRunner
    batch: Batch
    """Representative inputs."""
    first: FirstRun
    in_place: InPlace
    differentiable: Differentiable
    reached: Reached
    surroundings: tuple[Any, ...]
    device: torch.device
    is_standing: Callable[[], bool]
    """Whether everything in `reached` is certainly unchanged; if not, each part must be checked."""
    num_equal_changes: int = 0
    """How often that was written anew. It takes longer than checking each part once."""
