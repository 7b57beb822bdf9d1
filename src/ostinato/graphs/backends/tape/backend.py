"""The CPU backend: graphs are tapes."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...capturing.options import CaptureOptions
from ..protocol import PoolMemory
from .arena import TapeMemory
from .session import TapeSession


class TapeBackend:
    """Captures on any machine, with the rules of a CUDA graph."""

    name = "tape"
    device = torch.device("cpu")

    def new_memory(self, source: Any = None) -> PoolMemory:
        return TapeMemory(None if source is None else source.allocate)

    def session(self, memory: PoolMemory, options: CaptureOptions) -> TapeSession:
        assert isinstance(memory, TapeMemory)
        return TapeSession(memory, options)

    def stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def release_unused(self) -> None:
        """The CPU allocator keeps nothing back."""

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def order_replays(self) -> None:
        """Replays run on the caller's thread, in order."""
