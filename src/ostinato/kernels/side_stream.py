"""Kernels beside those of the current stream: a fork and a join, which a graph keeps as two branches.

What runs there may read what was written before the fork. Its memory is allocated before the fork and freed
behind the join, so that it is the current stream's. Kernels of the branch, and the first one behind the join,
are plain launches: a dependent launch has one kernel before it.

A capture forks for every product of every layer: streams and events are looked up, where torch's own
`wait_stream` and `stream` make and find theirs anew, which takes longer than to launch a kernel.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

_branches: dict[tuple[int, int], _Branch] = {}
"""By device and the stream that is forked. An event that is recorded again stands for what was queued later:
on the same stream that is only more to wait for."""


class _Branch:
    def __init__(self, current: torch.cuda.Stream) -> None:
        self._current, self._side = current, _side_stream(current.device)
        self._forked, self._joined = torch.cuda.Event(), torch.cuda.Event()

    def __enter__(self) -> None:
        self._forked.record(self._current)
        self._side.wait_event(self._forked)
        _make_current(self._side)

    def __exit__(self, *_: object) -> None:
        _make_current(self._current)

    def join(self) -> None:
        self._joined.record(self._side)
        self._current.wait_event(self._joined)


def forked(device: torch.device) -> AbstractContextManager[None]:
    """Inside, kernels go to the branch; on a CPU nothing is different."""
    return _branch(device) if device.type == "cuda" else nullcontext()


def join(device: torch.device) -> None:
    """Let the current stream wait for the branch."""
    if device.type == "cuda":
        _branch(device).join()


def _branch(device: torch.device) -> _Branch:
    index = torch.cuda.current_device() if device.index is None else device.index
    key = index, torch._C._cuda_getCurrentRawStream(index)  # type: ignore[attr-defined]
    branch = _branches.get(key)
    if branch is None:
        branch = _branches[key] = _Branch(torch.cuda.current_stream(index))
    return branch


def _make_current(stream: torch.cuda.Stream) -> None:
    torch._C._cuda_setStream(  # type: ignore[attr-defined]
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
