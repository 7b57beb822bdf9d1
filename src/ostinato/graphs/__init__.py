"""A CUDA Graph runtime for any PyTorch step with a varying batch.

`graphed` is the one-line door; `CudaGraphRunner` is what an engine builds on. The same contract holds on a
GPU (CUDA graphs) and on a CPU (the tape).
"""

from .addresses import AddressBook
from .buffers import InputBuffers
from .captured import CapturedGraph
from .descriptor import BatchDescriptor, BatchShape
from .dispatch import Decision, Dispatcher, Reason
from .errors import (
    AddressError,
    BatchError,
    CaptureError,
    ConfigError,
    OstinatoError,
    StaleOutputError,
    VerifyError,
)
from .fields import Extent, Field
from .gate import capture_gate, frozen_gc
from .graphed import graphed
from .graphed_call import step_mode
from .keys import GraphKey, capture_keys
from .ladder import Ladder
from .mode import Capability, GraphMode, lower
from .options import CaptureOptions
from .pool import GraphPool
from .report import Report
from .runner import CudaGraphRunner
from .segments import SegmentedGraph, eager_boundary
from .verify import Verification, verify

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
