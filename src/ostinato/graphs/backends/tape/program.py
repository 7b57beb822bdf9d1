"""Turns recorded calls into the straight-line calls of a replay.

An inside tensor has its place in memory before the first replay, so every recorded call must leave its
results at their places. From the cheapest way to the dearest: a view needs no call; an out-variant writes
straight into place; anything else runs as it did and its fresh results are copied into place.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ...memory import tensors_of
from .arena import Layout
from .calls import call_into, fast_call
from .recorder import RecordedOp, is_alias, specs_of
from .storages import StorageRecord, TensorSpec, map_leaves

aten = torch.ops.aten

# As a function; the method of a tensor has a `new_` before its name.
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "empty_permuted"}
_CONSTANTS = {"zeros": 0, "zeros_like": 0, "ones": 1, "ones_like": 1}
_COPIES = {"clone", "_to_copy", "lift_fresh_copy"}
# The position of the value among the arguments.
_FILLS = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}
# What a training step needs of them they return only where gradients are on.
_LOOK_AT_GRAD_MODE = {"mkldnn_rnn_layer"}
_FUNCTIONAL_COLLECTIVES = {"_c10d_functional", "_c10d_functional_autograd"}


class Call(NamedTuple):
    """One call of the replay, and what was recorded."""

    run: Callable[[], Any]
    op: RecordedOp


def _run_and_copy(run: Callable[[], Any], copy: Callable[[torch.Tensor], Any]) -> None:
    copy(run())


def _run_and_copy_some(run: Callable[[], Any], copies: list[tuple[int, Callable[..., Any]]]) -> None:
    results = tensors_of(run())
    for index, copy in copies:
        copy(results[index])


def _run_and_await(run: Callable[[], Any], written: list[torch.Tensor]) -> Any:
    result = run()
    for tensor in (*tensors_of(result), *written):
        torch.ops._c10d_functional.wait_tensor(tensor)
    return result


def _run_with_gradients(run: Callable[[], Any]) -> Any:
    with torch.enable_grad():
        return run()


def _run_and_await_work(run: Callable[[], Any]) -> None:
    result = run()
    (result[-1] if isinstance(result, tuple | list) else result).wait()


class Emitter:
    """Emits the calls of one tape. `calls_of` must see its segments in recorded order."""

    def __init__(self, records: list[StorageRecord], layout: Layout) -> None:
        self._records = records
        self._layout = layout
        self._tensors: dict[TensorSpec, torch.Tensor] = {}

    def calls_of(self, ops: list[RecordedOp]) -> list[Call]:
        emitted = ((self._emit(op), op) for op in ops)
        return [Call(run, op) for run, op in emitted if run is not None]

    def _tensor(self, spec: TensorSpec) -> torch.Tensor:
        tensor = self._tensors.get(spec)
        if tensor is None:
            tensor = self._tensors[spec] = self._layout.tensor(spec)
        return tensor

    def _thaw(self, value: Any) -> Any:
        return map_leaves(value, TensorSpec, self._tensor)

    def _emit(self, op: RecordedOp) -> Callable[[], Any] | None:
        func = op.func
        if func is aten.lift_fresh.default:
            return self._renew_constant(op)
        if is_alias(op) or (_name(func).removeprefix("new_") in _ALLOCATIONS and op.fresh):
            return None
        args, kwargs = self._thaw(op.args), self._thaw(op.kwargs)
        plain = partial(func._op, *args, **kwargs)
        if _name(func) in _LOOK_AT_GRAD_MODE:
            return self._copied(op, partial(_run_with_gradients, plain))
        if func.namespace == "c10d":
            return partial(_run_and_await_work, plain)
        if func.namespace in _FUNCTIONAL_COLLECTIVES:
            written = tensors_of(args) if func._schema.is_mutable else []
            return self._copied(op, partial(_run_and_await, plain, written))
        return self._into_place(op, args, kwargs) or self._copied(op, fast_call(func, args, kwargs) or plain)

    def _renew_constant(self, op: RecordedOp) -> Callable[[], Any] | None:
        """A Python constant is baked in; if the step writes to it, each replay starts from its value."""
        spec = op.args[0]
        if not self._records[spec.storage].written:
            return None
        constant = self._tensor(spec)
        return partial(constant.copy_, constant.clone())

    def _copied(self, op: RecordedOp, run: Callable[[], Any]) -> Callable[[], Any]:
        """The call, followed by copies of those fresh results that somebody uses."""
        results = specs_of(op.result)
        used = [(i, s) for i, s in enumerate(results) if s.storage in op.fresh and self._is_used(s)]
        if not used:
            return run
        if isinstance(op.result, TensorSpec):
            return partial(_run_and_copy, run, self._tensor(op.result).copy_)
        return partial(_run_and_copy_some, run, [(i, self._tensor(spec).copy_) for i, spec in used])

    def _is_used(self, spec: TensorSpec) -> bool:
        record = self._records[spec.storage]
        return record.last > record.first or record.kept or record.held is not None

    def _into_place(
        self, op: RecordedOp, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any] | None:
        """A call that writes to the places of its results, if each of them has fresh memory of its own."""
        if op.func._schema.is_mutable or not op.fresh:
            return None
        specs = (op.result,) if isinstance(op.result, TensorSpec) else op.result
        if not all(isinstance(spec, TensorSpec) and spec.storage in op.fresh for spec in specs):
            return None
        places = tuple(self._tensor(spec) for spec in specs)
        name = _name(op.func)
        if name in _COPIES:
            return partial(places[0].copy_, args[0])
        if (constant := _CONSTANTS.get(name.removeprefix("new_"))) is not None:
            return partial(places[0].fill_, constant)
        if name in _FILLS and len(args) > _FILLS[name]:
            return partial(places[0].fill_, args[_FILLS[name]])
        return call_into(op.func, args, kwargs, places)


def _name(func: Any) -> str:
    return str(func._schema.name.removeprefix("aten::"))


def describe(op: RecordedOp) -> str:
    """A recorded call for people to read."""

    def text(value: Any) -> str:
        if isinstance(value, TensorSpec):
            shape = "x".join(map(str, value.size)) or "scalar"
            return f"%{value.storage}:{str(value.dtype).removeprefix('torch.')}[{shape}]"
        if isinstance(value, list | tuple):
            return f"[{', '.join(text(item) for item in value)}]"
        return repr(value) if isinstance(value, str | int | float | bool | None) else str(value)

    arguments = [text(value) for value in op.args]
    arguments += [f"{name}={text(value)}" for name, value in op.kwargs.items()]
    return f"{text(op.result)} = {op.func}({', '.join(arguments)})"
