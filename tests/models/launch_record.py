"""What a step launches, in order, on a GPU that is not there.

The step runs on tensors without data under a mode that sees every op. Views and allocations are left out;
weights have their names, and other tensors a number by the memory they are in: two records are equal where
the same kernels run on the same operands.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_NO_LAUNCH = {
    "alias",
    "detach",
    "empty",
    "empty_like",
    "new_empty",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "t",
    "transpose",
    "unsqueeze",
    "view",
    "_unsafe_view",
}


class LaunchRecord(TorchDispatchMode):
    """The launches inside, a line for each."""

    def __init__(self, model: torch.nn.Module, others: dict[str, Tensor] | None = None) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._names = {
            tensor.untyped_storage()._cdata: name
            for name, tensor in [*model.named_parameters(), *model.named_buffers(), *(others or {}).items()]
        }
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        out = func(*args, **(kwargs or {}))
        namespace, _, op = func._schema.name.partition("::")
        if namespace != "prim" and op not in _NO_LAUNCH:
            named = [self._named(value) for value in given]
            results = out if isinstance(out, tuple | list) else [out]
            returned = ", ".join(self._named(value) for value in results)
            self.lines.append(f"{func._schema.name}({', '.join(named)}) -> {returned}")
        return out

    def _named(self, value: Any) -> str:
        if isinstance(value, list | tuple):
            return "[" + ", ".join(map(self._named, value)) + "]"
        if not isinstance(value, Tensor):
            return str(value)
        self._alive.append(value)  # or its memory would be another tensor's
        storage = value.untyped_storage()._cdata
        shape = "x".join(map(str, value.shape))
        if storage in self._names:
            return f"{self._names[storage]}[{shape}]"
        number = self._numbers.setdefault(storage, len(self._numbers))
        return f"%{number}[{shape} {str(value.dtype).removeprefix('torch.')}]"
