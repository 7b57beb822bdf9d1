"""The current stream, without the dozen microseconds that torch takes to return it."""

from __future__ import annotations

import torch


class CurrentStream:
    """Torch's current stream on a device."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self._raw: int | None = None
        self._stream: torch.cuda.Stream | None = None

    def get(self) -> torch.cuda.Stream:
        """The stream; the same object as long as the stream is the same."""
        if self._index is None:
            self._index = torch.cuda.current_device()
        raw = torch._C._cuda_getCurrentRawStream(self._index)  # type: ignore[attr-defined]
        if self._stream is None or raw != self._raw:
            self._stream, self._raw = torch.cuda.current_stream(self._index), raw
        return self._stream
