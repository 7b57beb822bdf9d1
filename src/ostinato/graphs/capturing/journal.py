"""A journal of writes to tensors that existed before, so that a trial run can be undone.

Warm-ups and recordings must leave no trace. The journal sees every ATen write (also those of custom ops
that declare what they mutate), saves the region about to change, and puts it back on `undo`. A raw kernel
launch shows nothing to it: state that such a kernel changes has to be declared to the runner.

Undoing does not empty the journal: a second run of the same step on the same inputs writes the same
regions, so the same journal undoes that as well, without being active during it.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..memory import byte_range, is_foreign, storage_address, tensors_of

aten = torch.ops.aten

# Ops that write arguments their schema does not mark, by position.
_UNDECLARED_WRITES: dict[Any, tuple[int, ...]] = {
    aten.native_batch_norm.default: (3, 4),  # the running statistics
    aten.cudnn_batch_norm.default: (3, 4),
}

# Ops that write a few rows of a large tensor: saving those rows is enough. Each entry reads the rows.
_ROW_WRITES: dict[Any, Callable[..., torch.Tensor]] = {
    aten.index_copy_.default: lambda self, dim, index, *_: self.index_select(dim, index),
}


def writes(func: Any) -> bool:
    """Whether an op writes any of its arguments."""
    return func._schema.is_mutable or func.namespace == "c10d" or func in _UNDECLARED_WRITES


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors an op is going to write, by its schema."""
    if func.namespace == "c10d":  # in-place collectives carry no alias annotation
        return list(tensors_of((args, kwargs)))
    written = list(tensors_of([args[i] for i in _UNDECLARED_WRITES.get(func, ()) if i < len(args)]))
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written += tensors_of(value)
    return written


class WriteJournal(TorchDispatchMode):
    """Active as a context manager; `undo()` restores what was written, as often as it is called."""

    def __init__(self, ignore: Iterable[torch.Tensor] = ()) -> None:
        """`ignore`: memory whose contents nobody needs; writes that stay within it are not saved."""
        super().__init__()
        self._ignored = [byte_range(tensor) for tensor in ignore]
        # Addresses of memory allocated while active. What existed before is never freed and reused for it
        # without becoming new, so an address is enough to tell the two apart.
        self._created: set[int] = set()
        self._undo: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(is_foreign(tensor) for tensor in tensors_of((args, kwargs))):
            return NotImplemented
        for tensor in written_arguments(func, args, kwargs) if writes(func) else ():
            self._save(func, tensor, args)
        result = func(*args, **kwargs)
        known = {storage_address(tensor) for tensor in tensors_of((args, kwargs))}
        made = {storage_address(tensor) for tensor in tensors_of(result) if not is_foreign(tensor)}
        self._created |= made - known
        return result

    def _save(self, func: Any, tensor: torch.Tensor, args: tuple[Any, ...]) -> None:
        if storage_address(tensor) in self._created or tensor.numel() == 0 or self._is_ignored(tensor):
            return
        target = tensor.detach()
        if func is aten.index_put_.default and not (len(args) > 3 and args[3]):
            indices = [None if index is None else index.clone() for index in args[1]]
            rows = aten.index.Tensor(target, indices)
            self._undo.append(lambda: aten.index_put_.default(target, indices, rows))
        elif func in _ROW_WRITES:
            dim, index = args[1], args[2].clone()
            rows = _ROW_WRITES[func](target, dim, index)
            self._undo.append(lambda: target.index_copy_(dim, index, rows))
        else:
            saved = target.clone()
            self._undo.append(lambda: target.copy_(saved))

    def _is_ignored(self, tensor: torch.Tensor) -> bool:
        start, end = byte_range(tensor)
        return any(first <= start and end <= last for first, last in self._ignored)

    def undo(self) -> None:
        """Put back every saved region, last write first."""
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for restore in reversed(self._undo):
                restore()
