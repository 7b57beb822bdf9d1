"""From the arguments of a call to the fields of a step, and back."""

import enum
import inspect
import re
import types
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch

from ..checking.stale import GuardedOutput
from ..dispatching.descriptor import BatchDescriptor, BatchShape
from ..errors import BatchError, ConfigError
from ..inputs.buffers import Batch
from ..inputs.fields import Extent, Field, Scalar
from ..trees import Structure, flatten, flatten_with_names
from ..trimming import same_constant

_MISSING = object()
_MOST_SHAPES = 4096
_CONSTANTS = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), slice, range, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(type, types.FunctionType, types.BuiltinFunctionType),
    *(np.number, np.bool_),
)
"""What can be compared with what was captured. Anything else may have been changed meanwhile."""


class EmptyBatchError(BatchError):
    """A call without any row, which no graph serves."""


class Rows(NamedTuple):
    """What is known of the tensors of a call."""

    shape: BatchShape
    device: torch.device | None
    """Where all are; None if they are not in one place, or not all plain tensors without gradients."""


@dataclass(frozen=True)
class Signature:
    """The structure of a call: which leaves are tensors, of which type and shape, and which are constants."""

    structure: Structure
    fields: tuple[Field | None, ...]
    """One per leaf; None for a constant."""
    constants: tuple[Any, ...]
    """One per leaf; None for a tensor."""
    given: tuple[int, tuple[str, ...]]
    """How many arguments are given by position, and the names of the others in order."""
    opaque: str | None
    """Why no graph can serve such a call: the first argument that cannot be compared, or copied."""

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        batch_dim: int | Mapping[str, int],
        shared: Sequence[str],
        pads: Mapping[str, Scalar],
    ) -> "Signature":
        """The signature of a call. `batch_dim`: where arguments count their rows, all or by name (others: 0).
        `shared`: arguments without a batch; `pads`: padding by argument."""
        leaves, structure = flatten_with_names((args, _in_order(kwargs)))
        parameters = _parameter_names(function, len(args))
        named = _with_unique_names([(*_names(path, name, parameters), leaf) for path, name, leaf in leaves])
        known = {argument for argument, _, _ in named}
        dims = batch_dim if isinstance(batch_dim, Mapping) else {}
        for name in (*shared, *pads, *dims):
            if name not in known:
                raise ConfigError(f"this call has no argument {name!r}, only {', '.join(sorted(known))}")
        fields: list[Field | None] = []
        opaque = None
        for argument, name, leaf in named:
            if not isinstance(leaf, torch.Tensor):
                fields.append(None)
                if not isinstance(leaf, _CONSTANTS):
                    kind = type(leaf).__name__
                    opaque = opaque or f"{name} is a {kind}, and changes to it cannot be detected"
                continue
            if not is_ordinary(leaf):
                fields.append(None)
                opaque = opaque or f"{name} is a {_kind(leaf)}, and graphs support ordinary tensors only"
                continue
            pad = pads.get(argument, False if leaf.dtype is torch.bool else 0)
            dim = dims.get(argument, 0) if isinstance(batch_dim, Mapping) else batch_dim
            if argument in dims and leaf.dim() <= dim:
                raise ConfigError(
                    f"batch_dim says {argument} has dimension {dim}, but {name} has {leaf.dim()}"
                )
            if argument in shared or leaf.dim() <= dim:
                fields.append(Field(name, leaf.dtype, tuple(leaf.shape), Extent.FIXED, pad))
            else:
                row = tuple(leaf.shape[:dim]) + tuple(leaf.shape[dim + 1 :])
                may_write = argument in pads
                fields.append(Field(name, leaf.dtype, row, Extent.TOKEN, pad, dim=dim, may_write=may_write))
        if opaque is None and not any(field is not None and field.per is Extent.TOKEN for field in fields):
            raise BatchError(f"no tensor argument has a batch dimension {batch_dim}")
        constants = [None if isinstance(leaf, torch.Tensor) else leaf for *_, leaf in leaves]
        given = len(args), tuple(sorted(kwargs))
        return cls(structure, tuple(fields), tuple(constants), given, opaque)

    @property
    def functions(self) -> list[Any]:
        """Functions among the constants."""
        return [constant for constant in self.constants if isinstance(constant, types.FunctionType)]

    @cached_property
    def is_flat(self) -> bool:
        """Returns whether every argument is one tensor or one constant: the commonest kind of call."""
        count, names = self.given
        return self.structure == flatten(((None,) * count, dict.fromkeys(names)))[1]

    def same_as(self, other: "Signature") -> bool:
        """Whether calls of the one are calls of the other."""
        return (
            self.structure == other.structure
            and self.fields == other.fields
            and all(map(same_constant, self.constants, other.constants))
        )

    def difference(self, other: "Signature") -> str:
        """How calls of the other signature differ from calls of this one."""
        if self.structure != other.structure:
            names, others = ([each.name for each in one.tensor_fields] for one in (self, other))
            if names != others and sorted(names) == sorted(others):
                first = next(now for name, now in zip(names, others, strict=True) if name != now)
                return (
                    f"their arguments have the captured entries in another order ({first} comes earlier), "
                    f"and code that goes through a dictionary sees that: fill it in one order"
                )
            return "their arguments have a different structure than the captured ones"
        for field, now, constant, given in zip(
            self.fields, other.fields, self.constants, other.constants, strict=True
        ):
            if field != now:
                return f"got {_described(now, given)}, but {_described(field, constant)} was captured"
            if field is None and not same_constant(constant, given):
                return f"got {given!r}, but {constant!r} was captured"
        return "their arguments differ from the captured ones"

    @property
    def tensor_fields(self) -> tuple[Field, ...]:
        """The fields, without the constants."""
        return tuple(field for field in self.fields if field is not None)

    def batch_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Batch, BatchShape] | None:
        """The call's tensors by field name and their shape; None if the call has another signature."""
        found = self.given_by(args, kwargs)
        return None if found is None else (found[0], found[1].shape)

    def given_by(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "tuple[Batch, Rows] | None":
        """Returns the call's tensors in the order of the fields, and what is known of them; None if the call
        has another signature."""
        count, names = self.given
        if self.is_flat:
            if len(args) != count or len(kwargs) != len(names):
                return None
            leaves: Sequence[Any] = (
                [*args, *(kwargs.get(name, _MISSING) for name in names)] if names else args
            )
        else:
            leaves, structure = flatten((args, _in_order(kwargs)))
            if structure != self.structure:
                return None
        batch: dict[str, torch.Tensor] = {}
        geometry: list[Any] = []
        for leaf, (name, constant) in zip(leaves, self._expected, strict=True):
            if name is not None:
                if not is_ordinary(leaf):
                    return None
                batch[name] = leaf
                is_plain = type(leaf) is torch.Tensor and not leaf.requires_grad
                geometry += leaf.dtype, leaf.shape, leaf.device if is_plain else None
            elif leaf is not constant and (
                isinstance(leaf, torch.Tensor) or not same_constant(leaf, constant)
            ):
                return None
        known = tuple(geometry)
        rows = self._known_rows.get(known)
        if rows is None:
            num_rows = self._rows_of(known)
            if num_rows is None:
                return None
            if len(self._known_rows) >= _MOST_SHAPES:
                self._known_rows.clear()
            devices = set(known[2::3])
            device = devices.pop() if len(devices) == 1 else None
            rows = self._known_rows[known] = Rows(BatchShape.decode(num_rows), device)
        return batch, rows

    @cached_property
    def _expected(self) -> tuple[tuple[str | None, Any], ...]:
        """Of each leaf the name of its field, or what it is equal to."""
        pairs = zip(self.fields, self.constants, strict=True)
        return tuple((None if field is None else field.name, constant) for field, constant in pairs)

    @cached_property
    def _known_rows(self) -> dict[tuple[Any, ...], "Rows"]:
        """What is known of batches by type, shape and device of their tensors in order."""
        return {}

    def _rows_of(self, geometry: Sequence[Any]) -> int | None:
        """The number of rows of tensors of this geometry; None if they are another signature's."""
        rows: int | None = None
        for field, dtype, shape in zip(self.tensor_fields, geometry[::3], geometry[1::3], strict=True):
            if dtype != field.dtype:
                return None
            if field.per is Extent.TOKEN:
                if len(shape) != len(field.shape) + 1:
                    return None
                size = shape[field.dim]
                rows = size if rows is None else rows
                if size == 0:
                    raise EmptyBatchError(f"{field.name} is empty: a batch must have at least one row")
                if size != rows:
                    raise BatchError(
                        f"{field.name} has a batch of {size}, but another argument has one of {rows}; name "
                        f"arguments without a batch in shared="
                    )
            if shape != field.full_shape(rows or 1, rows or 1):
                return None
        assert rows is not None
        return rows

    def call(self, function: Callable[..., Any], inputs: Mapping[str, torch.Tensor]) -> Any:
        """Call the function with these tensors in place of its own."""
        args, kwargs = self._arguments(inputs)
        return function(*args, **kwargs)

    def call_and_look(
        self, function: Callable[..., Any], inputs: Mapping[str, torch.Tensor]
    ) -> tuple[Any, list[str]]:
        """The same, and the arguments (lists, dictionaries, dataclasses) that hold something else now."""
        args, kwargs = self._arguments(inputs)
        names = [*_parameter_names(function, len(args)), *kwargs]
        given = [*args, *kwargs.values()]
        before = [] if self.is_flat else list(map(flatten, given))
        result = function(*args, **kwargs)
        changed = []
        for name, value, (leaves, structure) in zip(names, given, before, strict=False):
            now, structure_now = flatten(value)
            if structure_now != structure or not all(map(is_, now, leaves)):
                changed.append(name)
        return result, changed

    def _arguments(self, inputs: Mapping[str, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = [
            constant if field is None else inputs[field.name]
            for field, constant in zip(self.fields, self.constants, strict=True)
        ]
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = self.structure.filled(leaves)
        return arguments


def is_opaque(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call has an argument that no graph can compare with an earlier one's."""
    leaves = flatten((args, kwargs))[0]
    return not all(is_ordinary(leaf) or isinstance(leaf, _CONSTANTS) for leaf in leaves)


def is_ordinary(leaf: Any) -> bool:
    """Whether it is a tensor that a graph's buffer can stand for: not of a class with ways of its own, and
    with numbers in memory, not sparse, nested or quantised."""
    kind = type(leaf)
    if kind is not torch.Tensor and kind not in _ORDINARY:
        return False
    return leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_quantized


_ORDINARY = (torch.nn.Parameter, GuardedOutput)


def _kind(tensor: torch.Tensor) -> str:
    if type(tensor) is not torch.Tensor:
        return type(tensor).__name__
    return "nested tensor" if tensor.is_nested else f"{tensor.layout} tensor of {tensor.dtype}"


def _described(field: Field | None, constant: Any) -> str:
    if field is None:
        return repr(constant)
    dtype = str(field.dtype).removeprefix("torch.")
    per = "" if field.per is Extent.FIXED else " a row"
    return f"{field.name} of {dtype}{list(field.shape)}{per}"


class Examples:
    """Representative inputs made from the rows of one call."""

    def __init__(self, signature: Signature, batch: Batch) -> None:
        self._fields = signature.tensor_fields
        self._batch = {name: tensor.detach().clone() for name, tensor in batch.items()}

    def dummy(self, descriptor: BatchDescriptor) -> Batch:
        """As many rows as the rung has, repeating the example's."""
        return self._rows(torch.arange(descriptor.num_tokens, device="cpu"))

    def drawn(self, device: torch.device) -> "DrawnRows":
        """What makes batches out of the example's rows. An integer that is illegal as an index ends the
        process on CUDA, so none are drawn there: each row has those of one of the example's."""
        names = {field.name for field in self._fields if _holds_integers(field)}
        return DrawnRows(self, frozenset(names) if device.type == "cpu" else frozenset())

    def random(
        self, shape: BatchShape, generator: torch.Generator, redrawn: Collection[str], *, in_order: bool
    ) -> Batch:
        """Rows of the example, with noise on floating ones; integers of these names anew, between the least
        and the largest seen. `in_order`: rows follow each other as in the example."""
        rows = torch.arange(shape.num_tokens, device="cpu")
        if not in_order:
            rows = torch.randint(1 << 30, (shape.num_tokens,), generator=generator, device="cpu")
        batch = dict(self._rows(rows))
        for field in self._fields:
            value, seen = batch[field.name], self._batch[field.name]
            if field.dtype.is_floating_point:
                noise = torch.randn(value.shape, generator=generator, device="cpu")
                noise = noise.to(value.device, value.dtype)
                batch[field.name] = (value.double() + noise.double()).to(value.dtype)
            elif field.name in redrawn and seen.numel():
                drawn = torch.randint(
                    int(seen.min()), int(seen.max()) + 1, value.shape, generator=generator, device="cpu"
                )
                batch[field.name] = drawn.to(value.device, value.dtype)
        return batch

    def _rows(self, rows: torch.Tensor) -> Batch:
        chosen = {}
        for field in self._fields:
            value = self._batch[field.name]
            if field.per is Extent.TOKEN:
                index = (rows % value.size(field.dim)).to(value.device)
                value = value.index_select(field.dim, index)
            chosen[field.name] = value
        return chosen


@dataclass(frozen=True)
class DrawnRows:
    """Makes batches for `verify` out of the rows of one call."""

    examples: Examples
    redrawn: frozenset[str]
    """Arguments whose integers are drawn anew."""
    in_order: bool = False

    def __call__(self, shape: BatchShape, generator: torch.Generator) -> Batch:
        """A batch of this shape."""
        return self.examples.random(shape, generator, self.redrawn, in_order=self.in_order)

    def tamer(self, fails: Callable[["DrawnRows"], bool]) -> "tuple[DrawnRows, str] | None":
        """What stays closer to that call, and what it no longer draws. `fails`: whether the function fails on
        its batches. Integers that are legal each may be illegal together."""
        if self.redrawn:
            alone = [name for name in sorted(self.redrawn) if fails(replace(self, redrawn=frozenset([name])))]
            spared = alone or sorted(self.redrawn)
            said = f"integers of {', '.join(spared)} are those of the first call's rows"
            return replace(self, redrawn=self.redrawn - set(spared)), said
        return None if self.in_order else (replace(self, in_order=True), "rows are in the first call's order")


def _holds_integers(field: Field) -> bool:
    is_number = field.dtype.is_floating_point or field.dtype.is_complex or field.dtype is torch.bool
    return field.per is Extent.TOKEN and not is_number


def _in_order(kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(kwargs.items())) if len(kwargs) > 1 else kwargs


def _parameter_names(function: Callable[..., Any], count: int) -> list[str]:
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in positional]
    return names[:count] + [f"arg{i}" for i in range(len(names[:count]), count)]


def _names(path: tuple[Any, ...], name: str, parameters: Sequence[str]) -> tuple[str, str]:
    """(the argument, a unique identifier of the leaf within the call)."""
    group, first = path[:2]
    argument = parameters[first.idx] if group.idx == 0 else str(first.key)
    inner = re.sub(r"\W+", "_", name.removeprefix(f"{group}{first}")).strip("_")
    return argument, f"{argument}_{inner}" if inner else argument


def _with_unique_names(named: list[tuple[str, str, Any]]) -> list[tuple[str, str, Any]]:
    """Leaves whose paths read alike once they are identifiers are numbered."""
    seen: Counter[str] = Counter()
    unique = []
    for argument, name, leaf in named:
        seen[name] += 1
        unique.append((argument, name if seen[name] == 1 else f"{name}__{seen[name]}", leaf))
    return unique
