"""What a function reaches besides its arguments, and whether that has changed.

Note [Noticing changes]
A graph goes on doing what was captured. Before every call the wrapper compares, by identity, address and
geometry, all tensors that the function reaches, the modules and containers on the way to them, and hooks:
through itself, closures, partials, defaults, the object of a bound method, globals that its code names. These
are a few comparisons in C for every tensor, where replaying a kernel on it takes a microsecond. Everything
else that Python code may look at (numbers, functions, settings) is compared in debug mode only.

Note [Python state]
A replay runs no Python: what a function assigns stays as it was. So it may not assign tensors in every call;
and what trial runs have assigned is put back before a function that was refused runs eagerly.
"""

import functools
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

from ..checking.addresses import moved_error
from ..memory import storage_address
from ..trees import tensors_in
from ..trimming import same_constant

_MOST_OBJECTS = 20_000
_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_NOT_USERS = ("builtins", "torch", "numpy", "typing", "collections", "functools", "ostinato", "transformers")
_address, _stride, _numel = torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.numel
_training = attrgetter("training")
_MISSING = object()

_Place = tuple[str, Callable[[], Any], Any]
"""A name, how to look there, and what stood there."""


class Reached:
    """A snapshot of what a function reaches."""

    def __init__(self, *roots: Any, ignored: Collection[str] = ()) -> None:
        """`roots`: the function, and others that it is given. `ignored`: names of values that they change."""
        self._roots, self._ignored = roots, ignored
        self.modules: list[torch.nn.Module] = []
        self._tables: list[tuple[str, dict[Any, Any]]] = []
        self._hooks: list[dict[Any, Any]] = []
        self._places: list[_Place] = []
        self._values: list[_Place] = []
        self._holders: dict[int, tuple[str, Any]] = {}
        self._seen: dict[int, Any] = {}  # holds what was seen: identities must not be used again meanwhile
        self._leads: set[int] = set()
        for root in roots:
            self._visit("", root)
        self._seen.clear()
        self._saved = [(name, holder, _contents(holder)) for name, holder in self._holders.values()]
        self._in_tables = self._table_contents()
        self._code = self._hooks_and_sizes()
        found = [*self._in_tables, *(value for _, _, value in self._places)]
        self.tensors = [value for value in found if isinstance(value, torch.Tensor) and _has_memory(value)]
        self._geometry = self._geometry_now()

    # -- before every call -------------------------------------------------------------------------

    def is_unchanged(self) -> bool:
        """Whether every parameter, buffer, submodule and tensor is the same, in the same place."""
        tables = [table for _, table in self._tables]
        return (
            sum(map(len, tables)) == len(self._in_tables)
            and all(map(is_, chain.from_iterable(map(dict.values, tables)), self._in_tables))
            and self._geometry_now() == self._geometry
            and all(get() is value for _, get, value in self._places)
        )

    def is_same_code(self) -> bool:
        """Whether modules have the hooks that they had, and no attribute more or less."""
        now = self._hooks_and_sizes()
        return len(now) == len(self._code) and all(map(is_, now, self._code))

    def training(self) -> list[bool]:
        """Which modules are in training mode."""
        return list(map(_training, self.modules))

    def changed_values(self) -> list[str]:
        """The names of other Python values that are others now: debug mode."""
        return [name for name, get, value in self._values if not same_constant(get(), value)]

    def check(self) -> None:
        """Raise AddressError, naming what has moved or was replaced."""
        if self.is_unchanged():
            return
        before = dict(zip(map(id, self.tensors), zip(*self._geometry, strict=True), strict=True))
        saved = {id(holder): contents for _, holder, contents in self._saved}
        now: list[tuple[str, Any, Any]] = [
            (f"{name}{key}", table.get(key), saved[id(table)].get(key))
            for name, table in self._tables
            for key in {**saved[id(table)], **table}
        ]
        now += [(name, get(), value) for name, get, value in self._places]
        changed = [f"{name} (replaced)" for name, value, old in now if value is not old]
        changed += [
            f"{name} (moved)"
            for name, value, old in now
            if value is old
            and id(value) in before
            and (_address(value), _stride(value), _numel(value)) != before[id(value)]
        ]
        raise moved_error(changed or ["parameters, buffers or submodules (added or taken away)"])

    # -- around trial runs -------------------------------------------------------------------------

    def renewed(self) -> "Reached":
        """A snapshot of now, without values that have changed since this one: to be taken over trial runs, in
        which the function has changed nothing but what it always changes."""
        own = [name for name, get, value in self._places if get() is not value]
        return Reached(*self._roots, ignored={*own, *self.changed_values()})

    def assigned(self) -> "Assigned":
        """Where tensors stand now that did not stand there."""
        found = Assigned()
        for name, holder, saved in self._saved:
            for key, value in _items(holder):
                was = saved.get(key, _MISSING)
                if value is not was and tensors_in(value):
                    found.places.append((f"{name}{key}", holder, key, was))
                    found.is_state |= any(holder is table for _, table in self._tables)
        return found

    def put_back(self) -> None:
        """Undo assignments: everything reached holds what it held."""
        for _, holder, saved in self._saved:
            now = _contents(holder)
            if list(now) == list(saved) and all(map(is_, now.values(), saved.values())):
                continue
            if isinstance(holder, list | deque):
                holder.clear()
                holder.extend(saved.values())
                continue
            for key in now.keys() - saved.keys():
                delattr(holder, key) if not isinstance(holder, dict) else holder.pop(key)
            for key, value in saved.items():
                _put(holder, key, value)

    # -- internals ---------------------------------------------------------------------------------

    def _table_contents(self) -> list[Any]:
        return list(chain.from_iterable(table.values() for _, table in self._tables))

    def _hooks_and_sizes(self) -> list[Any]:
        # Sizes are small numbers, of which there is one object each.
        return [*chain.from_iterable(map(dict.values, self._hooks)), *(len(vars(m)) for m in self.modules)]

    def _geometry_now(self) -> tuple[list[int], list[Any], list[int]]:
        tensors = self.tensors
        return list(map(_address, tensors)), list(map(_stride, tensors)), list(map(_numel, tensors))

    def _visit(self, name: str, value: Any) -> bool:
        """Follow a value; whether that leads to a tensor or module."""
        if id(value) in self._seen or len(self._seen) > _MOST_OBJECTS:
            return id(value) in self._leads
        self._seen[id(value)] = value
        found = self._follow(name, value)
        if found:
            self._leads.add(id(value))
        return found

    def _follow(self, name: str, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return True
        if isinstance(value, torch.nn.Module):
            return self._follow_module(name, value)
        if isinstance(value, types.FunctionType):
            return self._follow_function(value)
        if isinstance(value, types.MethodType):
            return self._visit(f"{name}self", value.__self__) | self._visit(name, value.__func__)
        if isinstance(value, functools.partial):
            inside = self._visit(name, value.func) | self._visit(f"{name}args", value.args)
            return inside | self._follow_holder(name, value.keywords)
        if isinstance(value, torch.optim.Optimizer):
            return self._follow_holder(f"{name}.state", value.state)
        if isinstance(value, dict | list | tuple | deque):
            return self._follow_holder(name, value)
        if _is_users(type(value).__module__) and not isinstance(value, type | types.ModuleType):
            found = self._follow_holder(f"{name}.", vars(value)) if hasattr(value, "__dict__") else False
            found |= self._follow_holder(f"{name}.", value) if _slots(value) else False
            return found | self._follow_class(type(value))
        return False

    def _follow_module(self, name: str, module: torch.nn.Module) -> bool:
        prefix = f"{name}." if name else ""
        for path, inner in module.named_modules():
            self._seen[id(inner)] = inner
            self._leads.add(id(inner))
            self.modules.append(inner)
            own, inside = vars(inner), f"{prefix}{path}." if path else prefix
            tables = [own[table] for table in _TABLES if type(own.get(table)) is dict]  # not in TorchScript
            self._tables += [(inside, table) for table in tables]
            self._hooks += [own[hooks] for hooks in _HOOKS if isinstance(own.get(hooks), dict)]
            for holder in (own, *tables):
                self._holders[id(holder)] = inside, holder
            for hook in chain.from_iterable(own.get(hooks, {}).values() for hooks in _HOOKS):
                self._visit("", hook)
            for key in own.keys() - _OF_EVERY_MODULE:
                self._note(f"{inside}{key}", functools.partial(own.get, key), own[key])
            self._follow_class(type(inner))
        return True

    def _follow_class(self, kind: type) -> bool:
        for base in kind.__mro__:
            if _is_users(base.__module__) and id(base) not in self._seen:
                self._seen[id(base)] = base
                for function in vars(base).values():
                    if isinstance(function, types.FunctionType):
                        self._visit("", function)
        return False

    def _follow_function(self, function: types.FunctionType) -> bool:
        found = False
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._holders[id(cell)] = f"{variable} ", cell
            found |= self._note(variable, functools.partial(_item, cell, "contents"), _item(cell, "contents"))
        if not _is_users(function.__module__):
            return found
        defaults = function.__defaults__ or ()
        named = function.__code__.co_varnames[: function.__code__.co_argcount][-len(defaults) :]
        given = dict(zip(named, defaults, strict=False)) | (function.__kwdefaults__ or {})
        for variable, default in given.items():
            found |= self._note(variable, functools.partial(_item, (default,), 0), default)
        for variable in _names_in(function.__code__):
            if variable in function.__globals__:
                get = functools.partial(function.__globals__.get, variable)
                found |= self._note(variable, get, function.__globals__[variable])
        return found

    def _follow_holder(self, name: str, holder: Any) -> bool:
        self._seen[id(holder)] = holder
        if not isinstance(holder, tuple):
            self._holders[id(holder)] = name, holder
        found = False
        for key, value in _items(holder):
            get = functools.partial(_item, holder, key)
            found |= self._note(f"{name}{key}" if isinstance(key, str) else f"{name}[{key}]", get, value)
        return found

    def _note(self, name: str, get: Callable[[], Any], value: Any) -> bool:
        if name in self._ignored or isinstance(value, types.ModuleType):
            return False
        leads = self._visit(name, value)
        (self._places if leads else self._values).append((name, get, value))
        return leads


class Assigned:
    """Places that a function assigns tensors to: results of another kind, which a replay hands out there."""

    def __init__(self) -> None:
        self.places: list[tuple[str, Any, Any, Any]] = []
        """Name, holder, key, and what stood there before."""
        self.is_state = False
        """Whether one of them is a parameter or buffer."""

    def __bool__(self) -> bool:
        return bool(self.places)

    def carried_on(self, reads: Collection[int]) -> str | None:
        """A place whose former tensor was used (its storage is among `reads`), or that is in a list: state that
        is kept by assignment, which no replay would carry on."""
        for name, holder, _, was in self.places:
            if self.is_state or isinstance(holder, list | deque):
                return name
            if was is not _MISSING and any(storage_address(t) in reads for t in tensors_in(was)):
                return name
        return None

    def storages(self) -> set[int]:
        """Where the tensors that stand there now have their memory."""
        values = (_item(holder, key) for _, holder, key, _ in self.places)
        return {storage_address(tensor) for value in values for tensor in tensors_in(value)}

    def with_result(self, result: Any) -> tuple[Any, list[Any]]:
        """The function's result, and what stands in these places now."""
        return result, [_item(holder, key) for _, holder, key, _ in self.places]

    def put(self, served: tuple[Any, list[Any]]) -> Any:
        """Let what a replay made stand there; the result."""
        result, values = served
        for (_, holder, key, _), value in zip(self.places, values, strict=True):
            _put(holder, key, value)
        return result


def _contents(holder: Any) -> dict[Any, Any]:
    return dict(_items(holder))


def _slots(value: Any) -> list[str]:
    names = [getattr(base, "__slots__", ()) for base in type(value).__mro__]
    listed = chain.from_iterable([name] if isinstance(name, str) else name for name in names)
    return [name for name in listed if name not in ("__dict__", "__weakref__") and hasattr(value, name)]


def _items(holder: Any) -> list[tuple[Any, Any]]:
    """What a dictionary, list, closure or object with slots holds, by key."""
    if isinstance(holder, dict):
        return list(holder.items())
    if isinstance(holder, types.CellType):
        return [("contents", _item(holder, "contents"))]
    if isinstance(holder, list | tuple | deque):
        return list(enumerate(holder))
    return [(name, getattr(holder, name)) for name in _slots(holder)]


def _item(holder: Any, key: Any) -> Any:
    if isinstance(holder, dict):
        return holder.get(key)
    if isinstance(holder, types.CellType):
        try:
            return holder.cell_contents
        except ValueError:  # not assigned yet
            return None
    if isinstance(holder, list | tuple | deque):
        return holder[key] if key < len(holder) else None
    return getattr(holder, key, None)


def _put(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, dict):
        holder[key] = value
    elif isinstance(holder, types.CellType):
        holder.cell_contents = value
    else:
        setattr(holder, key, value)


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Global names that a function's code mentions, functions defined inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _is_users(module: str | None) -> bool:
    return (module or "").partition(".")[0] not in _NOT_USERS


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        tensor.data_ptr()
    except (RuntimeError, ValueError):  # sparse, lazy or of a subclass without memory of its own
        return False
    return True
