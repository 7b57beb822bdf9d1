"""How a graph is captured."""

from dataclasses import dataclass

import torch

from .errors import ConfigError

ERROR_MODES = ("thread_local", "global", "relaxed")


@dataclass(frozen=True)
class CaptureOptions:
    """Settings for capturing; the same for every graph of a runner."""

    warmups: int = 2
    """Eager runs before recording, so that all kernels are compiled and tuned. Their effects are undone."""

    freeze_gc: bool = True
    """Run Python's garbage collector, then freeze it while capturing; if off, leave it alone."""

    debug_log: bool = False
    """Log every graph as it is captured: descriptor, nodes, bytes, time."""

    weak_output: bool = True
    """Outputs share the pool's memory and are overwritten by the next replay of any graph. If off, each graph
    has its own memory for outputs, overwritten only by its own next replay."""

    keep_graph: bool = False
    """Keep the raw graph for inspection or editing (`CapturedGraph.raw`)."""

    error_mode: str = "thread_local"
    """CUDA's capture error mode. With `thread_local`, other threads may use CUDA during capture."""

    generators: tuple[torch.Generator, ...] = ()
    """Random generators that the step draws from, besides the device's default one."""

    strict: bool = False
    """Raise if a rung cannot be captured, instead of reporting it and running its batches eagerly."""

    def __post_init__(self) -> None:
        if self.warmups < 0:
            raise ConfigError(f"warmups must be 0 or more, not {self.warmups}")
        if self.error_mode not in ERROR_MODES:
            raise ConfigError(f"unknown error_mode {self.error_mode!r}: use one of {', '.join(ERROR_MODES)}")
