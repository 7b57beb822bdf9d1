"""A CUDA Graph runtime for any PyTorch step with a varying batch.

`graphed` wraps any function or module in one line; `CudaGraphRunner` is for engines. Both work the same way
on a GPU (CUDA graphs) and on a CPU (the tape).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Type checkers read imports, not the table below; `X as X` tells them that X is public.
if TYPE_CHECKING:  # isort: off
    from .block import CapturedBlock as CapturedBlock, capture_block as capture_block
    from .capturing.captured import CapturedGraph as CapturedGraph
    from .capturing.gate import capture_gate as capture_gate, frozen_gc as frozen_gc
    from .options import CaptureOptions as CaptureOptions
    from .capturing.pool import GraphPool as GraphPool
    from .capturing.segments import SegmentedGraph as SegmentedGraph, eager_boundary as eager_boundary
    from .checking.addresses import AddressBook as AddressBook
    from .checking.obstacles import Obstacle as Obstacle, ObstacleWatch as ObstacleWatch
    from .checking.verify import Verification as Verification, verify as verify
    from .current_stream import CurrentStream as CurrentStream
    from .dispatching.descriptor import BatchDescriptor as BatchDescriptor, BatchShape as BatchShape
    from .dispatching.dispatch import Decision as Decision, Dispatcher as Dispatcher, Reason as Reason
    from .dispatching.keys import GraphKey as GraphKey, capture_keys as capture_keys
    from .dispatching.ladder import Ladder as Ladder
    from .dispatching.mode import Capability as Capability, GraphMode as GraphMode, lower as lower
    from .dispatching.step_mode import step_mode as step_mode
    from .errors import (
        AddressError as AddressError,
        BatchError as BatchError,
        CaptureError as CaptureError,
        ConfigError as ConfigError,
        OstinatoError as OstinatoError,
        StaleOutputError as StaleOutputError,
        VerifyError as VerifyError,
    )
    from .inputs.buffers import InputBuffers as InputBuffers
    from .inputs.fields import Extent as Extent, Field as Field
    from .report import Report as Report
    from .results import Results as Results
    from .runner import CudaGraphRunner as CudaGraphRunner
    from .training.callables import make_graphed_callables as make_graphed_callables
    from .training.graphed_train_step import graphed_train_step as graphed_train_step
    from .training.step import TrainStep as TrainStep
    from .wrapping.doctor import Diagnosis as Diagnosis
    from .wrapping.graphed import graphed as graphed

_PUBLIC = {
    "block": "CapturedBlock capture_block",
    "capturing.captured": "CapturedGraph",
    "capturing.gate": "capture_gate frozen_gc",
    "options": "CaptureOptions",
    "capturing.pool": "GraphPool",
    "capturing.segments": "SegmentedGraph eager_boundary",
    "checking.addresses": "AddressBook",
    "checking.obstacles": "Obstacle ObstacleWatch",
    "checking.verify": "Verification verify",
    "current_stream": "CurrentStream",
    "dispatching.descriptor": "BatchDescriptor BatchShape",
    "dispatching.dispatch": "Decision Dispatcher Reason",
    "dispatching.keys": "GraphKey capture_keys",
    "dispatching.ladder": "Ladder",
    "dispatching.mode": "Capability GraphMode lower",
    "dispatching.step_mode": "step_mode",
    "errors": "AddressError BatchError CaptureError ConfigError OstinatoError StaleOutputError VerifyError",
    "inputs.buffers": "InputBuffers",
    "inputs.fields": "Extent Field",
    "report": "Report",
    "results": "Results",
    "runner": "CudaGraphRunner",
    "training.callables": "make_graphed_callables",
    "training.graphed_train_step": "graphed_train_step",
    "training.step": "TrainStep",
    "wrapping.doctor": "Diagnosis",
    "wrapping.graphed": "graphed",
}
_HOMES = {name: module for module, names in _PUBLIC.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that code which needs only an exception does not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
