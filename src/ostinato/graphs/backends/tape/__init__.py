"""The tape: the CPU stand-in for a CUDA graph, with the same contract."""

from .arena import TapeMemory
from .backend import TapeBackend
from .session import Tape

__all__ = ["Tape", "TapeBackend", "TapeMemory"]
