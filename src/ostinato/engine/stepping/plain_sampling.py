"""Tokens of requests with at most a temperature and a seed: chosen at the end of a decode graph.

So most steps are one graph. Requests that need more are skipped here; a sampling graph after the decode graph
serves only them, and writes their tokens into the same line.
"""

from torch import Tensor

from ostinato.kernels.sampling.plain import PlainSettings, return_plain

from .device_rows import DeviceRows
from .token_return import TokenReturn


class PlainSampling:
    """Called by a graph once the logits are there."""

    def __init__(self, rows: DeviceRows, logits: Tensor, returned: TokenReturn) -> None:
        self._logits = logits
        self._settings = PlainSettings(rows["is_plain"], rows["temperature"], rows["seeds"], rows["lengths"])
        self._lines = returned.lines

    def __call__(self, req_rows: Tensor) -> None:
        """Captured: choose, and leave the tokens in their rows and in the next line."""
        return_plain(self._logits[: req_rows.size(0)], req_rows, self._settings, self._lines)
