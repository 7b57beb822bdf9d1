"""Which of an engine's memory can be released, under which tag, and what happens to its contents.

| memory | tag | class | after it is restored |
|---|---|---|---|
| parameters, slots of adapters | weights | data | restored, or lost, as requested |
| buffers of the model (rotary tables), weights of a draft | weights | once | always restored |
| KV cache, page 0 included | kv_cache | scratch | zeros, as at the start; no request has pages then |
| rows of requests (row 0), counts, templates, inputs, logits, states of sampling | graphs | once | restored |
| intermediates of graphs, workspaces in their pool | graphs | scratch | written by each replay |

Everything else stays: the context, executables of graphs, libraries and their workspaces, the counters of
attention kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import nn

from ostinato.cache.kv import KVCache
from ostinato.kernels.allocation import Allocate
from ostinato.memory import Content, GraphMemory, MemorySaver

Tag = Literal["weights", "kv_cache"]
"""`weights`: filled by loading, and can be filled again. `kv_cache`: worthless once its requests are gone."""

Arenas = Callable[[Tag, torch.device], Allocate | None]
"""`arenas(tag, device)`: allocates memory of this tag; None: torch does."""


def from_torch(tag: Tag, device: torch.device) -> Allocate | None:
    """No arenas."""
    return None


_CONTENTS: dict[Tag, Content] = {"weights": Content.DATA, "kv_cache": Content.SCRATCH}


class SavedMemory:
    """Everything that an engine in sleep mode allocates for good."""

    def __init__(self, device: torch.device, *, hostile: bool = False) -> None:
        self.saver = MemorySaver(device, hostile=hostile)
        self.of_graphs = GraphMemory(self.saver)
        """Allocates the graphs' pool and inputs."""

    def arenas(self, tag: Tag, device: torch.device) -> Allocate:
        """Allocates weights and pages."""
        assert device == self.saver.device

        def allocate(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
            return self.saver.empty(shape, dtype, tag, _CONTENTS[tag])

        return allocate

    def lasting(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
        """Allocate memory that is released and restored with the weights, but always keeps its contents:
        there is no other copy of them."""
        return self.saver.empty(shape, dtype, "weights", Content.ONCE)

    def static_buffers(self) -> AbstractContextManager[None]:
        """A context in which to allocate what graphs point to."""
        return self.saver.region("graphs", Content.ONCE)

    def take_over_buffers(self, model: nn.Module) -> None:
        """Move buffers that the model has computed itself; call before anything is captured."""
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                place = self.saver.empty(tuple(buffer.shape), buffer.dtype, "weights", Content.ONCE)
                setattr(module, name, place.copy_(buffer))

    def clear_at_wake(self, kv: KVCache) -> None:
        """Zero the KV cache when it is restored: padding reads page 0, and values that attention multiplies
        by 0 must not be NaN."""
        pages = list(kv.named_tensors().values())
        self.saver.on_resume("kv_cache", lambda: torch._foreach_zero_(pages))
