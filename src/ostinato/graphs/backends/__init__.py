"""One backend per kind of device: CUDA graphs on a GPU, the tape on a CPU."""

from functools import cache

import torch

from ..errors import ConfigError
from .protocol import Backend, Kept, PoolMemory, Recording, Segment, Session

__all__ = ["Backend", "Kept", "PoolMemory", "Recording", "Segment", "Session", "backend_for"]


def backend_for(device: torch.device | str) -> Backend:
    """The backend of a device; the same object each time, because it owns that device's stream."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        if not torch.cuda.is_available():
            raise ConfigError("device 'cuda' was requested, but torch sees no CUDA device; use 'cpu'")
        device = torch.device("cuda", torch.cuda.current_device())
    return _backend(device)


@cache
def _backend(device: torch.device) -> Backend:
    if device.type == "cuda":
        from .cuda import CudaBackend

        return CudaBackend(device)
    if device.type == "cpu":
        from .tape import TapeBackend

        return TapeBackend()
    raise ConfigError(f"no graph backend for device type {device.type!r}: use 'cuda' or 'cpu'")
