"""What a function reaches besides its arguments: modules, tensors and Python values, and whether they changed.

Note [Noticing changes]
A graph goes on reading what it was captured with. Before every call the wrapper therefore compares, by
identity and address, all parameters, buffers and submodules of every module that the function reaches
(through itself, closures, partials, defaults, the object of a bound method, globals that its code names), and
tensors that it reaches directly. That is a few comparisons in C for every tensor, where replaying a kernel on
it takes a microsecond. Numbers and strings that Python code may look at are compared in debug mode only.
"""

import functools
import types
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

from ..checking.addresses import moved_error
from ..memory import storage_address
from ..trimming import same_constant

_MOST_OBJECTS = 10_000
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_TABLES = ("_parameters", "_buffers", "_modules")
_address = torch.Tensor.data_ptr
_training = attrgetter("training")


class Reached:
    """A snapshot of what a function reaches."""

    def __init__(self, function: Callable[..., Any], ignored: Collection[str] = ()) -> None:
        """`ignored`: names of what the function changes itself."""
        self._function = function
        self._ignored = ignored
        self._tables: list[dict[str, Any]] = []
        self._table_names: list[str] = []
        self._places: list[tuple[str, Callable[[], Any], Any]] = []
        self._scalars: list[tuple[str, Callable[[], Any], Any]] = []
        self.modules: list[torch.nn.Module] = []
        self._seen: dict[int, Any] = {}  # holds what was seen: identities must not be used again meanwhile
        self._visit("", function)
        self._seen.clear()
        self._contents = list(chain.from_iterable(map(dict.values, self._tables)))
        found = [*self._contents, *(value for _, _, value in self._places)]
        self.tensors = [value for value in found if isinstance(value, torch.Tensor) and _has_address(value)]
        self._addresses = list(map(_address, self.tensors))

    def is_unchanged(self) -> bool:
        """Whether every parameter, buffer, submodule and tensor is the same, in the same place."""
        return (
            sum(map(len, self._tables)) == len(self._contents)
            and all(map(is_, chain.from_iterable(map(dict.values, self._tables)), self._contents))
            and list(map(_address, self.tensors)) == self._addresses
            and all(get() is value for _, get, value in self._places)
        )

    def training(self) -> list[bool]:
        """Which modules are in training mode."""
        return list(map(_training, self.modules))

    def changed_values(self) -> list[str]:
        """The names of Python values that are others now."""
        return [name for name, get, value in self._scalars if not same_constant(get(), value)]

    def renewed(self) -> "Reached":
        """A snapshot of now, without attributes that have changed since this one: to be taken over trial
        runs, in which the function has changed nothing but what it always changes."""
        own = [name for name, get, value in self._places if get() is not value]
        return Reached(self._function, {*own, *self.changed_values()})

    def replaced(self, reads: Collection[int]) -> str | None:
        """A tensor that was used (its storage's address is among `reads`) and that another one stands for
        now: state that a function keeps by assignment, which no replay would repeat."""
        changed = [(name, value) for name, get, value in self._places if get() is not value]
        now = chain.from_iterable(map(dict.items, self._tables))
        for (name, value), was in zip(now, self._contents, strict=False):
            if value is not was:
                changed.append((name, was))
        for name, was in changed:
            if isinstance(was, torch.Tensor) and storage_address(was) in reads:
                return name
        return None

    def check(self) -> None:
        """Raise AddressError, naming what has moved or was replaced."""
        if self.is_unchanged():
            return
        addresses = dict(zip(map(id, self.tensors), self._addresses, strict=True))
        before = iter(self._contents)
        changed: list[str] = []
        for name, table in zip(self._table_names, self._tables, strict=True):
            # Tables keep their order, so names of the snapshot follow as long as nothing was added or taken.
            for key, value in table.items():
                was = next(before, None)
                if value is not was:
                    changed.append(f"{name}{key} (replaced)")
                elif id(value) in addresses and _address(value) != addresses[id(value)]:
                    changed.append(f"{name}{key} (moved)")
        for name, get, value in self._places:
            if get() is not value:
                changed.append(f"{name} (replaced)")
            elif id(value) in addresses and _address(value) != addresses[id(value)]:
                changed.append(f"{name} (moved)")
        raise moved_error(changed or ["parameters, buffers or submodules (added or taken away)"])

    # -- internals ---------------------------------------------------------------------------------

    def _visit(self, name: str, value: Any) -> None:
        if id(value) in self._seen or len(self._seen) > _MOST_OBJECTS:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.nn.Module):
            self._visit_module(name, value)
        elif isinstance(value, types.FunctionType):
            self._visit_function(name, value)
        elif isinstance(value, types.MethodType):
            self._visit(name, value.__func__)
            self._visit(f"{name}self", value.__self__)
        elif isinstance(value, functools.partial):
            self._visit(name, value.func)
            self._visit(f"{name}args", value.args)
            self._visit_table(name, value.keywords)
        elif isinstance(value, dict):
            self._visit_table(name, value)
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                self._note(f"{name}[{number}]", functools.partial(_item, value, number), item)
        elif _is_users(type(value)) and hasattr(value, "__dict__") and not isinstance(value, type):
            self._visit_table(f"{name}.", vars(value))
            if callable(value):
                self._visit(f"{name}.__call__", type(value).__call__)

    def _visit_module(self, name: str, module: torch.nn.Module) -> None:
        prefix = f"{name}." if name else ""
        for path, inner in module.named_modules():
            self._seen[id(inner)] = inner
            self.modules.append(inner)
            inside = f"{prefix}{path}." if path else prefix
            for table in _TABLES:
                self._tables.append(vars(inner)[table])
                self._table_names.append(inside)
            self._visit_table(inside, {k: v for k, v in vars(inner).items() if k not in _TABLES}, vars(inner))

    def _visit_function(self, name: str, function: types.FunctionType) -> None:
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._note(variable, functools.partial(_cell_contents, cell), _cell_contents(cell))
        defaults = function.__defaults__ or ()
        named = function.__code__.co_varnames[: function.__code__.co_argcount][-len(defaults) :]
        for variable, default in (
            *zip(named, defaults, strict=False),
            *(function.__kwdefaults__ or {}).items(),
        ):
            self._note(variable, functools.partial(_item, (default,), 0), default)
        if not _is_users_module(function.__module__):
            return
        for variable in _names_in(function.__code__):
            if variable in function.__globals__:
                getter = functools.partial(function.__globals__.get, variable)
                self._note(variable, getter, function.__globals__[variable])

    def _visit_table(self, name: str, table: dict[Any, Any], live: dict[Any, Any] | None = None) -> None:
        holder = table if live is None else live
        for key, value in list(table.items()):
            if (
                isinstance(key, str)
                and key not in ("training", "graph_call")
                and not key.startswith("_forward")
            ):
                self._note(f"{name}{key}", functools.partial(holder.get, key), value)

    def _note(self, name: str, get: Callable[[], Any], value: Any) -> None:
        if name in self._ignored:
            return
        if isinstance(value, torch.Tensor | torch.nn.Module):
            self._places.append((name, get, value))
        elif type(value) in _SCALARS:
            self._scalars.append((name, get, value))
        if not isinstance(value, torch.Tensor | types.ModuleType):
            self._visit(name, value)


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Global names that a function's code mentions, functions defined inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _cell_contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _item(sequence: Any, number: int) -> Any:
    return sequence[number] if number < len(sequence) else None


def _is_users(kind: type) -> bool:
    return _is_users_module(kind.__module__)


def _is_users_module(name: str | None) -> bool:
    return (name or "").partition(".")[0] not in (
        "builtins",
        "torch",
        "numpy",
        "typing",
        "collections",
        "ostinato",
    )


def _has_address(tensor: torch.Tensor) -> bool:
    try:
        tensor.data_ptr()
    except RuntimeError:  # sparse, lazy or of a subclass without memory of its own
        return False
    return True
