"""Records every ATen call of a step, below autograd: forward, backward and optimizer alike."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ...dispatch_mode import WatchingMode
from ...errors import CaptureError
from ...journal import SavedWrites, written_arguments
from ...memory import is_foreign, is_plain, tensors_of
from .refusals import check_op
from .storages import StorageTable, TensorSpec, map_leaves

aten = torch.ops.aten


@dataclass(slots=True)
class RecordedOp:
    """One call, with tensors as specs."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    fresh: frozenset[int]
    """Numbers of the storages that this call brought into being."""


class Recorder(WatchingMode):
    """Active between `begin` and `finish`; while `active` is off it records nothing. What is written is saved
    in either case."""

    def __init__(self) -> None:
        super().__init__()
        self.saved = SavedWrites()
        self.active = False
        self.storages = StorageTable()
        self.segments: list[list[RecordedOp]] = []
        self._position = 0

    def start_segment(self) -> None:
        self.segments.append([])
        self.active = True

    def stop_segment(self) -> None:
        self.active = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_of((args, kwargs))
        if any(map(is_foreign, inputs)):
            return NotImplemented
        if not self.active or any(
            tensor.is_meta for tensor in inputs
        ):  # geometry alone, as transforms ask for
            return self._call(func, args, kwargs, inputs)
        check_op(func, args, kwargs, self.storages)
        writes = func._schema.is_mutable
        # An op may resize what it writes (out= of the wrong size): replay needs the geometry after that.
        read: list[TensorSpec] = []
        frozen = None if writes else self._freeze_inputs(args, kwargs, read)
        result = self._call(func, args, kwargs, inputs)
        if writes:
            for tensor in written_arguments(func, args, kwargs):
                if (record := self.storages.known(tensor)) is not None:
                    record.written = True
            frozen = self._freeze_inputs(args, kwargs, read)
        self._record(func, frozen, read, result)
        return result

    def pass_unseen(self, why_not_captured: str) -> None:
        """A tape would repeat the case of the recording."""
        if self.active:
            raise CaptureError(why_not_captured)

    def _call(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        if not all(map(is_plain, given)):
            return func(*args, **kwargs)
        self.saved.before(func, args, kwargs)
        result = func(*args, **kwargs)
        self.saved.after(given, [tensor for tensor in tensors_of(result) if is_plain(tensor)])
        return result

    def keep(self, tensor: torch.Tensor) -> TensorSpec:
        """Note that replay must find a tensor at this point of the step."""
        last_call = max(self._position - 1, 0)
        spec = self.storages.use(self.storages.spec(tensor, last_call), last_call)
        self.storages.records[spec.storage].kept = True
        return spec

    def _freeze_inputs(self, args: Any, kwargs: Any, read: list[TensorSpec]) -> Any:
        """The arguments with tensors as specs, which are noted in `read`."""
        spec_of, position = self.storages.spec, self._position

        def freeze(tensor: torch.Tensor) -> TensorSpec:
            read.append(spec_of(tensor, position))
            return read[-1]

        return map_leaves((args, kwargs), torch.Tensor, freeze)

    def _record(self, func: Any, frozen: Any, read: list[TensorSpec], result: Any) -> None:
        storages = self.storages
        known, fresh = len(storages.records), set[int]()
        has_outputs = False

        def freeze_output(tensor: torch.Tensor) -> Any:
            nonlocal has_outputs
            if tensor.is_meta:
                return None
            has_outputs = True
            spec = storages.spec(tensor, self._position, fresh=True)
            if spec.storage >= known:
                fresh.add(spec.storage)
            return spec

        plain = tuple(result) if isinstance(result, tuple) else result  # not a named one
        frozen_result = map_leaves(plain, torch.Tensor, freeze_output)
        if not has_outputs and (not read or (func._schema.returns and not func._schema.is_mutable)):
            return  # no device work: a profiler mark, a question about metadata
        args, kwargs = frozen
        op = RecordedOp(func, args, kwargs, frozen_result, frozenset(fresh))
        if not is_alias(op):
            for spec in read:
                storages.use(spec, self._position)
        self.segments[-1].append(op)
        self._position += 1


def specs_of(value: Any) -> list[TensorSpec]:
    found: list[TensorSpec] = []
    map_leaves(value, TensorSpec, found.append)
    return found


_UNDECLARED_ALIASES = {"aten::_unsafe_view", "_c10d_functional::wait_tensor"}


@cache
def _is_inplace_view(func: Any) -> bool:
    return torch.Tag.inplace_view in func.tags


@cache
def _may_alias(func: Any) -> bool:
    """An op that works only when its result has fresh memory."""
    schema = func._schema
    if schema.is_mutable or not schema.returns:
        return False
    declared = all(returned.alias_info is not None for returned in schema.returns)
    return declared or schema.name in _UNDECLARED_ALIASES


def is_alias(op: RecordedOp) -> bool:
    """Whether a call only gives another view of memory, so that replay has nothing to do."""
    return _is_inplace_view(op.func) or (not op.fresh and _may_alias(op.func))
