"""A CUDA Graph runtime for any PyTorch step with a varying batch.

`graphed` is the one-line door; `CudaGraphRunner` is what an engine builds on. The same contract holds on a
GPU (CUDA graphs) and on a CPU (the tape).
"""

from .capturing.captured import CapturedGraph
from .capturing.gate import capture_gate, frozen_gc
from .capturing.options import CaptureOptions
from .capturing.pool import GraphPool
from .capturing.segments import SegmentedGraph, eager_boundary
from .checking.addresses import AddressBook
from .checking.verify import Verification, verify
from .dispatching.descriptor import BatchDescriptor, BatchShape
from .dispatching.dispatch import Decision, Dispatcher, Reason
from .dispatching.keys import GraphKey, capture_keys
from .dispatching.ladder import Ladder
from .dispatching.mode import Capability, GraphMode, lower
from .dispatching.step_mode import step_mode
from .errors import (
    AddressError,
    BatchError,
    CaptureError,
    ConfigError,
    OstinatoError,
    StaleOutputError,
    VerifyError,
)
from .inputs.buffers import InputBuffers
from .inputs.fields import Extent, Field
from .report import Report
from .runner import CudaGraphRunner
from .wrapping.graphed import graphed

__all__ = [
    "AddressBook",
    "AddressError",
    "BatchDescriptor",
    "BatchError",
    "BatchShape",
    "Capability",
    "CaptureError",
    "CaptureOptions",
    "CapturedGraph",
    "ConfigError",
    "CudaGraphRunner",
    "Decision",
    "Dispatcher",
    "Extent",
    "Field",
    "GraphKey",
    "GraphMode",
    "GraphPool",
    "InputBuffers",
    "Ladder",
    "OstinatoError",
    "Reason",
    "Report",
    "SegmentedGraph",
    "StaleOutputError",
    "Verification",
    "VerifyError",
    "capture_gate",
    "capture_keys",
    "eager_boundary",
    "frozen_gc",
    "graphed",
    "lower",
    "step_mode",
    "verify",
]
