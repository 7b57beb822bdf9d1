"""A CUDA Graph runtime for any PyTorch step with a varying batch.

`graphed` is the one-line door; `CudaGraphRunner` is what an engine builds on. The same contract holds on a
GPU (CUDA graphs) and on a CPU (the tape).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .capturing.captured import CapturedGraph
    from .capturing.gate import capture_gate, frozen_gc
    from .capturing.options import CaptureOptions
    from .capturing.pool import GraphPool
    from .capturing.segments import SegmentedGraph, eager_boundary
    from .checking.addresses import AddressBook
    from .checking.verify import Verification, verify
    from .current_stream import CurrentStream
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
    "CurrentStream",
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

_HOMES = {
    "AddressBook": ".checking.addresses",
    "AddressError": ".errors",
    "BatchDescriptor": ".dispatching.descriptor",
    "BatchError": ".errors",
    "BatchShape": ".dispatching.descriptor",
    "Capability": ".dispatching.mode",
    "CaptureError": ".errors",
    "CaptureOptions": ".capturing.options",
    "CapturedGraph": ".capturing.captured",
    "ConfigError": ".errors",
    "CudaGraphRunner": ".runner",
    "CurrentStream": ".current_stream",
    "Decision": ".dispatching.dispatch",
    "Dispatcher": ".dispatching.dispatch",
    "Extent": ".inputs.fields",
    "Field": ".inputs.fields",
    "GraphKey": ".dispatching.keys",
    "GraphMode": ".dispatching.mode",
    "GraphPool": ".capturing.pool",
    "InputBuffers": ".inputs.buffers",
    "Ladder": ".dispatching.ladder",
    "OstinatoError": ".errors",
    "Reason": ".dispatching.dispatch",
    "Report": ".report",
    "SegmentedGraph": ".capturing.segments",
    "StaleOutputError": ".errors",
    "Verification": ".checking.verify",
    "VerifyError": ".errors",
    "capture_gate": ".capturing.gate",
    "capture_keys": ".dispatching.keys",
    "eager_boundary": ".capturing.segments",
    "frozen_gc": ".capturing.gate",
    "graphed": ".wrapping.graphed",
    "lower": ".dispatching.mode",
    "step_mode": ".dispatching.step_mode",
    "verify": ".checking.verify",
}


def __getattr__(name: str) -> Any:
    """The public names, imported when first asked for: who needs an exception only need not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(_HOMES[name], __name__), name)
    return found
