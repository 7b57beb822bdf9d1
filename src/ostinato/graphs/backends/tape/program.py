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
from .fastcalls import IN_PLACE, OUT, PLAIN, lookup
from .layout import Layout
from .outvariants import FACTORY_ARGUMENTS, find_out_variant
from .recorder import RecordedOp, is_alias, specs_of
from .storages import StorageRecord, TensorSpec, map_leaves

aten = torch.ops.aten

_ALLOCATIONS = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::empty_permuted",
    "aten::new_empty",
    "aten::new_empty_strided",
}
_COPIES = {"aten::clone", "aten::_to_copy", "aten::lift_fresh_copy"}
_ZEROS = {"aten::zeros", "aten::zeros_like", "aten::new_zeros"}
_ONES = {"aten::ones", "aten::ones_like", "aten::new_ones"}
# The position of the value among the arguments.
_FILLS = {"aten::full": 1, "aten::full_like": 1, "aten::new_full": 2, "aten::scalar_tensor": 0}

_SCALAR_OPERATORS = {
    "add",
    "sub",
    "mul",
    "div",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "add_",
    "sub_",
    "mul_",
    "div_",
}
_COLLECTIVES = {"_c10d_functional", "_c10d_functional_autograd"}


class Call(NamedTuple):
    """One call of the replay, and what was recorded."""

    run: Callable[[], Any]
    op: RecordedOp


def _run_and_copy(run: Callable[[], Any], copy: Callable[[torch.Tensor], Any]) -> None:
    copy(run())


def _run_and_copy_some(
    run: Callable[[], Any], copies: list[tuple[int, Callable[[torch.Tensor], Any]]]
) -> None:
    results = list(tensors_of(run()))
    for index, copy in copies:
        copy(results[index])


def _run_and_await(run: Callable[[], Any], written: list[torch.Tensor]) -> Any:
    result = run()
    for tensor in (*tensors_of(result), *written):
        torch.ops._c10d_functional.wait_tensor(tensor)
    return result


def _run_and_await_work(run: Callable[[], Any]) -> None:
    result = run()
    work = result[-1] if isinstance(result, tuple | list) else result
    work.wait()


class Emitter:
    """Emits the calls of one tape. `calls_of` must see its segments in recorded order."""

    def __init__(self, records: list[StorageRecord], layout: Layout) -> None:
        self._records = records
        self._layout = layout
        self._tensors: dict[TensorSpec, torch.Tensor] = {}

    def calls_of(self, ops: list[RecordedOp]) -> list[Call]:
        calls = []
        for op in ops:
            run = self._emit(op)
            if run is not None:
                calls.append(Call(run, op))
        return calls

    def _tensor(self, spec: TensorSpec) -> torch.Tensor:
        tensor = self._tensors.get(spec)
        if tensor is None:
            tensor = self._tensors[spec] = self._layout.tensor(spec)
        return tensor

    def _thaw(self, value: Any) -> Any:
        return map_leaves(value, TensorSpec, self._tensor)

    def _emit(self, op: RecordedOp) -> Callable[[], Any] | None:
        name = op.func._schema.name
        if op.func is aten.lift_fresh.default:
            return self._renew_constant(op)
        if is_alias(op) or (name in _ALLOCATIONS and op.fresh):
            return None
        if op.func.namespace in _COLLECTIVES or op.func.namespace == "c10d":
            return self._emit_collective(op)
        if op.func._schema.is_mutable or not op.fresh:
            return self._copied(op, self._again(op, IN_PLACE))
        return self._fill_or_copy(op) or self._into_place(op) or self._copied(op, self._again(op, PLAIN))

    def _renew_constant(self, op: RecordedOp) -> Callable[[], Any] | None:
        """A Python constant is baked in; if the step writes to it, each replay starts from its value."""
        spec = op.args[0]
        if not self._records[spec.storage].written:
            return None
        constant = self._tensor(spec)
        return partial(constant.copy_, constant.clone())

    def _again(self, op: RecordedOp, table: dict[str, Callable[..., Any]]) -> Callable[[], Any]:
        """The recorded call on the tape's own tensors."""
        args, kwargs = self._thaw(op.args), self._thaw(op.kwargs)
        binding = lookup(table, op.func, op.args)
        if binding is None:
            return partial(op.func._op, *args, **kwargs)
        return partial(binding, *self._with_scalar_tensors(op, args), **kwargs)

    def _copied(self, op: RecordedOp, run: Callable[[], Any]) -> Callable[[], Any]:
        """The call, followed by copies of those fresh results that somebody uses."""
        results = specs_of(op.result)
        used = [
            (i, spec) for i, spec in enumerate(results) if spec.storage in op.fresh and self._is_used(spec)
        ]
        if not used:
            return run
        if isinstance(op.result, TensorSpec):
            return partial(_run_and_copy, run, self._tensor(op.result).copy_)
        return partial(_run_and_copy_some, run, [(i, self._tensor(spec).copy_) for i, spec in used])

    def _is_used(self, spec: TensorSpec) -> bool:
        record = self._records[spec.storage]
        return record.last > record.first or record.kept or record.held is not None

    def _emit_collective(self, op: RecordedOp) -> Callable[[], Any]:
        run = partial(op.func._op, *self._thaw(op.args), **self._thaw(op.kwargs))
        if op.func.namespace == "c10d":
            return partial(_run_and_await_work, run)
        written = [self._tensor(spec) for spec in specs_of(op.args)] if op.func._schema.is_mutable else []
        return self._copied(op, partial(_run_and_await, run, written))

    def _fill_or_copy(self, op: RecordedOp) -> Callable[[], Any] | None:
        name = op.func._schema.name
        if not isinstance(op.result, TensorSpec):
            return None
        if name in _COPIES:
            return partial(self._tensor(op.result).copy_, self._tensor(op.args[0]))
        if name in _ZEROS:
            return self._tensor(op.result).zero_
        if name in _ONES:
            return partial(self._tensor(op.result).fill_, 1)
        if name in _FILLS and len(op.args) > _FILLS[name]:
            return partial(self._tensor(op.result).fill_, op.args[_FILLS[name]])
        return None

    def _into_place(self, op: RecordedOp) -> Callable[[], Any] | None:
        """The call as an out-variant, if every result is a tensor with fresh memory of its own."""
        results = (op.result,) if isinstance(op.result, TensorSpec) else op.result
        if lookup(PLAIN, op.func, op.args) is not None or not all(
            isinstance(spec, TensorSpec) and spec.storage in op.fresh for spec in results
        ):
            return None
        places = tuple(self._tensor(spec) for spec in results)
        args, kwargs = self._thaw(op.args), self._thaw(op.kwargs)
        binding = lookup(OUT, op.func, op.args)
        if binding is not None:
            if any(argument.name == "pin_memory" for argument in op.func._schema.arguments):
                kwargs = {name: value for name, value in kwargs.items() if name not in FACTORY_ARGUMENTS}
            args = self._with_scalar_tensors(op, args)
            return partial(binding, *args, **kwargs, out=places if len(places) > 1 else places[0])
        variant = find_out_variant(op.func)
        if variant is None:
            return None
        kwargs = {name: value for name, value in kwargs.items() if name not in variant.dropped}
        outs = dict(zip(variant.outs, places, strict=True))
        return partial(variant.func._op, *args, **kwargs, **outs)

    def _with_scalar_tensors(self, op: RecordedOp, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace a Python number by a tensor of the other operand's type, which is 3 times cheaper.

        Only where torch would convert the number to that very type before computing, so that not a bit
        changes: an operand of a type that computes in itself, and a number of the same category.
        """
        if op.func._opname not in _SCALAR_OPERATORS or len(args) != 2:
            return args
        operand, number = args
        if not isinstance(operand, torch.Tensor) or operand.is_conj():
            return args
        floating = operand.dtype in (torch.float32, torch.float64)
        if (floating and type(number) in (int, float)) or (
            operand.dtype is torch.int64 and type(number) is int
        ):
            return operand, torch.tensor(number, dtype=operand.dtype, device="cpu")
        return args


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
