"""How a graph is captured."""

from dataclasses import dataclass

import torch

from .errors import ConfigError

ERROR_MODES = ("thread_local", "global", "relaxed")


@dataclass(frozen=True)
class CaptureOptions:
    """Settings of a capture; the same for every graph of a runner."""

    warmups: int = 2
    """Eager runs before recording, so that every kernel is compiled and tuned. They leave no trace."""

    freeze_gc: bool = True
    """Collect, then freeze Python's garbage collector while capturing; off: leave it alone."""

    debug_log: bool = False
    """Log every graph as it is captured: descriptor, nodes, bytes, time."""

    weak_output: bool = True
    """Outputs share the pool's memory and are overwritten by the next replay of any graph.
    Off: each graph's outputs keep memory of their own until that graph's next replay."""

    keep_graph: bool = False
    """Keep the raw graph for inspection or editing (`CapturedGraph.raw`)."""

    error_mode: str = "thread_local"
    """CUDA's capture error mode. `thread_local` is what a server needs: other threads may use CUDA."""

    generators: tuple[torch.Generator, ...] = ()
    """Random generators besides the device's default one that the step draws from."""

    strict: bool = False
    """Raise when a rung cannot be captured, instead of reporting it and running its batches eagerly."""

    def __post_init__(self) -> None:
        if self.warmups < 0:
            raise ConfigError(f"warmups must be 0 or more, not {self.warmups}")
        if self.error_mode not in ERROR_MODES:
            raise ConfigError(f"unknown error_mode {self.error_mode!r}: use one of {', '.join(ERROR_MODES)}")
