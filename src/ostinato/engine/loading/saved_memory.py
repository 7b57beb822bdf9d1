"""Which memory of an engine can be given back, under which tag, and what becomes of its contents.

| memory | tag | class | when it is back |
|---|---|---|---|
| parameters, slots of adapters | weights | data | restored, or lost, as asked |
| buffers of the model (rotary tables), weights of a draft | weights | once | restored, whatever was asked |
| KV cache, page 0 included | kv_cache | scratch | zeros, as at the start; no request has pages then |
| rows of requests (row 0), counts, templates, inputs, logits, states of sampling | graphs | once | restored |
| intermediates of graphs, workspaces in their pool | graphs | scratch | written by each replay |

What is not here stays: the context, executables of graphs, libraries and their workspaces, the counters of
attention kernels.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn

from ostinato.cache.kv import KVCache
from ostinato.kernels.allocation import Allocate
from ostinato.memory import Content, GraphMemory, MemorySaver

from .arenas import Tag

_CONTENTS: dict[Tag, Content] = {"weights": Content.DATA, "kv_cache": Content.SCRATCH}


class SavedMemory:
    """Everything that an engine in sleep mode allocates for good."""

    def __init__(self, device: torch.device, *, hostile: bool = False) -> None:
        self.saver = MemorySaver(device, hostile=hostile)
        self.of_graphs = GraphMemory(self.saver)
        """What the graphs' pool and their inputs are made of."""

    def arenas(self, tag: Tag, device: torch.device) -> Allocate:
        """Who allocates weights and pages."""
        assert device == self.saver.device

        def allocate(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
            return self.saver.empty(shape, dtype, tag, _CONTENTS[tag])

        return allocate

    def lasting(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
        """Allocate what goes with the weights and comes back with them, whatever becomes of those: nobody
        else has it."""
        return self.saver.empty(shape, dtype, "weights", Content.ONCE)

    def static_buffers(self) -> AbstractContextManager[None]:
        """A context for whoever allocates what graphs point to."""
        return self.saver.region("graphs", Content.ONCE)

    def take_over_buffers(self, model: nn.Module) -> None:
        """Move what the model has computed for itself; before anything is captured."""
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                place = self.saver.empty(tuple(buffer.shape), buffer.dtype, "weights", Content.ONCE)
                setattr(module, name, place.copy_(buffer))

    def clear_at_wake(self, kv: KVCache) -> None:
        """Padding reads page 0, and what attention multiplies with zero must not be NaN."""
        pages = list(kv.named_tensors().values())
        self.saver.on_resume("kv_cache", lambda: torch._foreach_zero_(pages))
