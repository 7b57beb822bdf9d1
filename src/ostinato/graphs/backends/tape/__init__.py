"""The tape: the CPU stand-in for a CUDA graph, with the same contract."""

from .arena import TapeMemory
from .backend import TapeBackend

__all__ = ["TapeBackend", "TapeMemory"]
