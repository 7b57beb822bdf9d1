"""Kernels beside those of the current stream: a fork and a join, which a graph keeps as two branches.

What runs there may read what was written before the fork. Its memory is allocated before the fork and freed
behind the join, so that it is the current stream's. Kernels of the branch, and the first one behind the join,
are plain launches: a dependent launch has one kernel before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def forked(device: torch.device) -> Iterator[None]:
    """Inside, kernels go to the branch; on a CPU nothing is different."""
    if device.type != "cuda":
        yield
        return
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


def join(device: torch.device) -> None:
    """Let the current stream wait for the branch."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_side_stream(device))


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
