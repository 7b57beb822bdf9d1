"""The way from a function to all that it reaches: tensors, the containers and modules on the way to them,
and what else its code may look at."""

import contextvars
import functools
import gc
import logging
import sys
import types
import weakref
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import Any

import torch

from ..memory import storage_address
from .code_names import mentioned, names_in
from .effects import Way
from .holders import ARRAYS, CONTENTS, GENERATORS, WHOLE, Key, PartOf, item_of, items_of, slots_of
from .user_code import (
    NAMESPACES,
    functions_in,
    is_called_by_python,
    is_closed,
    is_data,
    is_descriptor,
    is_looked_through,
    is_namespace,
    is_own,
    is_read_whole,
    is_taken_from,
    is_users,
    may_grow,
    read_by_methods,
)
from .ways import Ways

logger = logging.getLogger("ostinato.graphs")

_MOST_OBJECTS = 50_000
_LARGE = 256
"""Entries of a container of plain values: one that has more is compared as one thing."""
_TOO_LARGE = 100_000
_TOO_LARGE_ARRAY = 1 << 24
"""Entries, and bytes, that are not compared at every call: a step that uses them is refused."""
_TABLES = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Where a module keeps them."""
_HOOKS_OF_GRADIENTS = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
"""Where modules and tensors keep those that a backward pass calls."""
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, types.ModuleType)
_CONTAINERS = (dict, list, tuple, deque, set)
_WITHOUT_WAYS = (*_PLAIN, tuple, torch.Tensor, torch.nn.Module, types.FunctionType, type)
"""What leads to no container that may be replaced behind a step, see Note [Where it is now] in effects.py."""
_VIEWS = tuple(map(type, ({}.keys(), {}.values(), {}.items())))
_AROUND_CONTAINERS = (UserDict, UserList, ChainMap, types.MappingProxyType, *_VIEWS)


class Walk:
    """From these roots."""

    def __init__(
        self,
        roots: Iterable[Any],
        reads: Collection[int] | None,
        ignored: Collection[Key],
        with_hooks_of: Callable[[Any], bool] | None,
        ran: Collection[types.CodeType] | None,
    ) -> None:
        """As `Reached`."""
        self._reads, self._ignored, self._with_hooks_of = reads, ignored, with_hooks_of
        self._ran = ran
        self.modules: list[torch.nn.Module] = []
        self.watched: list[tuple[Any, Any, Any, str]] = []
        self.values: list[tuple[Any, Any, Any, str]] = []
        self._closed: list[tuple[Any, Any, str, str]] = []
        self.objects: list[Any] = []
        """Those with attributes, besides modules."""
        self.codes: set[types.CodeType] = set()
        """Of functions that were followed."""
        self.holders: dict[Any, tuple[str, Any]] = {}
        self._noted: dict[Key, Any] = {}
        self._seen: dict[int, Any] = {}  # holds what was seen: identities must not be used again meanwhile
        self._leads: set[int] = set()
        self._is_beside = False
        """Inside a module that another one merely refers to: of that, only what is read counts."""
        self._of_classes: list[tuple[type, str, Any]] = []
        """Methods and values of classes on the way."""
        self._names: set[str] = set()
        """All that code which was followed mentions: a method is called by its name."""
        self.of_objects: set[int] = set()
        """Attributes of objects that are no modules, by identity."""
        self.of_bound: set[int] = set()
        """Those of objects whose methods are followed: what else is in them is read by these methods."""
        self._names_to = Ways()
        self.ways: dict[int, Way] = {}
        """How containers were reached, by identity."""
        self._of_others: list[tuple[type, tuple[Any, Any, Any, str]]] = []
        """Numbers in objects whose code is not read, such as torch's schedulers, by kind of object."""
        # What may grow, see Note [What was added] in reached.py: tables of modules, attributes with how they
        # are called, and containers.
        self.tables: list[dict[str, Any]] = []
        self.attributes: dict[int, tuple[str, Mapping[str, Any]]] = {}
        self._is_aside = False
        """Inside a method that nobody calls by name: of that, only tensors count."""
        for root in roots:
            self._visit("", root)
        self._follow_classes()
        may_read = self._names_to.readable(self.called_names)
        self.values = [
            (holder, key, *rest)
            for holder, key, *rest in self.values
            if may_read(holder, key) or (isinstance(holder, type) and is_called_by_python(key))
        ]
        self.closed = [(name, why) for holder, key, name, why in self._closed if may_read(holder, key)]
        """What code may use although nobody can compare or undo it, and why."""
        read_of = {kind: read_by_methods(kind, self.called_names) for kind, _ in self._of_others}
        self.values += [entry for kind, entry in self._of_others if entry[1] in read_of[kind]]
        self.containers = self._names_to.containers()
        growing = self._names_to.growing(self.called_names)
        self.growing = [
            container
            for container in growing
            if id(container) in self.holders and not isinstance(container, ARRAYS)
        ]
        if len(self._seen) > _MOST_OBJECTS:
            logger.warning(
                "the function reaches more than %d objects: changes to the others are not noticed",
                _MOST_OBJECTS,
            )
        self._seen.clear()

    def _visit(self, name: str, value: Any) -> bool:
        """Follow a value; whether that leads to a tensor that counts."""
        if isinstance(value, _PLAIN):
            return False
        if id(value) in self._seen or len(self._seen) > _MOST_OBJECTS:
            return id(value) in self._leads
        self._seen[id(value)] = value
        found = self._follow(name, value)
        if found:
            self._leads.add(id(value))
        return found

    def _follow(self, name: str, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            self._follow_hooks_of_gradients(value)
            return self._reads is None or (has_memory(value) and storage_address(value) in self._reads)
        if isinstance(value, weakref.ProxyType | weakref.CallableProxyType):
            return False
        if isinstance(value, weakref.ReferenceType):
            return self._visit(name, value())
        if isinstance(value, torch.nn.Module):
            return self._follow_module(name, value)
        if isinstance(value, type):
            self._follow_class(value)
            return False
        if isinstance(value, types.FunctionType):
            return self._follow_function(value)
        if isinstance(value, types.MethodType):
            if not isinstance(value.__self__, torch.nn.Module) and hasattr(value.__self__, "__dict__"):
                self.of_bound.add(id(vars(value.__self__)))
            return self._visit(f"{name}self", value.__self__) | self._visit(name, value.__func__)
        if isinstance(value, functools.partial):
            inside = self._visit(name, value.func) | self._visit(f"{name}args", value.args)
            return inside | self._follow_holder(name, value.keywords)
        if isinstance(value, torch.optim.Optimizer):
            for number, group in enumerate(value.param_groups):
                self._note_numbers(f"{name}.param_groups[{number}].", group, dict)
            return self._follow_holder(f"{name}.state", value.state)
        if isinstance(value, contextvars.ContextVar):
            return self._follow_holder(f"{name}.", value)
        if isinstance(value, _CONTAINERS):
            self._names_to.add_container(value)
            is_named = isinstance(value, dict) and bool(name)
            return self._follow_holder(f"{name}." if is_named else name, value) | self._follow_object(
                name, value
            )
        if isinstance(value, GENERATORS):
            self.holders[id(value)] = name, value
            return False
        if isinstance(value, ARRAYS):
            self._names_to.add_container(value)
            contents = item_of(value, CONTENTS)
            if len(contents) > _TOO_LARGE_ARRAY:
                why = f"has {len(contents) >> 20} MiB, too many to compare at every call: use a tensor"
                self._closed.append((value, CONTENTS, name, why))
                return False
            self.holders[id(value)] = name, value
            return self._note(name, value, CONTENTS, contents)
        if isinstance(value, _AROUND_CONTAINERS):
            return self._visit(name, _inside(value)) | self._follow_object(name, value)
        found = self._follow_object(name, value)
        for function in functions_in(value):
            found |= self._visit(name, function)
        return found

    def _follow_object(self, name: str, value: Any) -> bool:
        kind = type(value)
        if is_looked_through(kind) and not is_namespace(value) and hasattr(value, "__dict__"):
            self._names_to.add_container(vars(value))
            return self._follow_holder(f"{name}.", vars(value))
        if not (is_users(kind.__module__) or is_namespace(value)):
            self._note_numbers(f"{name}.", getattr(value, "__dict__", {}), kind)
            return False
        found = False
        if hasattr(value, "__dict__"):
            self.of_objects.add(id(vars(value)))
            self.objects.append(value)
            self._add_owner(f"{name}.", vars(value), kind)
            found = self._follow_holder(f"{name}.", vars(value))
        if slots_of(value) and not isinstance(value, _CONTAINERS):
            self._names_to.add_owner(value, is_read_whole=is_read_whole(kind), is_own=is_own(kind.__module__))
            found |= self._follow_holder(f"{name}.", value)
        self._follow_class(kind)
        return found

    def _note_numbers(self, name: str, attributes: dict[str, Any], kind: type) -> None:
        """Of something whose code is not read, numbers and lists of them count where code that is read
        mentions them, or a method that reads them."""
        if self._is_aside or type(attributes) is not dict:
            return
        for key, entry in attributes.items():
            if isinstance(entry, (*_PLAIN, list)):
                self._of_others.append((kind, (attributes, key, entry, f"{name}{key}")))

    def _follow_module(self, name: str, module: torch.nn.Module) -> bool:
        self.modules.append(module)
        prefix, own = f"{name}." if name else "", vars(module)
        self._follow_class(type(module))
        for hook in chain.from_iterable(own.get(hooks, {}).values() for hooks in HOOKS):
            self._visit("", hook)
        self._follow_hooks_of_gradients(module)
        found = False
        for table in (own[table] for table in _TABLES if type(own.get(table)) is dict):  # not in TorchScript
            found |= self._follow_holder(prefix, table)
        if (found or not self._is_beside) and may_grow(module):
            self.tables += [own[table] for table in _TABLES if type(own.get(table)) is dict]
        self.holders[id(own)] = prefix, own
        self._add_owner(prefix, own, type(module))
        before, self._is_beside = self._is_beside, True
        for key in own.keys() - _OF_EVERY_MODULE:
            found |= self._note(f"{prefix}{key}", own, key, own[key])
        slots = [key for key in slots_of(module) if key != "graph_call"]  # of our wrappers
        if slots:
            self._names_to.add_owner(module, is_read_whole=is_read_whole(type(module)), is_own=True)
        for key in slots:
            found |= self._note(f"{prefix}{key}", module, key, getattr(module, key))
        self._is_beside = before
        return found

    def _add_owner(self, prefix: str, attributes: dict[str, Any] | type, kind: type) -> None:
        is_users_own = is_own(kind.__module__) or issubclass(kind, NAMESPACES)
        self._names_to.add_owner(attributes, is_read_whole=is_read_whole(kind), is_own=is_users_own)
        if is_users_own and not self._is_aside:
            names = vars(attributes) if isinstance(attributes, type) else attributes
            self.attributes[id(attributes)] = prefix, names

    def _follow_hooks_of_gradients(self, owner: Any) -> None:
        for hooks in (
            _HOOKS_OF_GRADIENTS if self._with_hooks_of is not None and self._with_hooks_of(owner) else ()
        ):
            for hook in (getattr(owner, hooks, None) or {}).values():
                self._visit("", hook)

    # -- classes: only what code mentions of them --------------------------------------------------

    def _follow_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if is_users(base.__module__) and id(base) not in self.holders:
                self.holders[id(base)] = f"{base.__name__}.", base
                self._add_owner(f"{base.__name__}.", base, base)
                self._of_classes += [(base, key, entry) for key, entry in list(vars(base).items())]
        if type(kind) is not type and is_users(type(kind).__module__):
            self._follow_class(type(kind))

    def _follow_classes(self) -> None:
        """What may be looked at, whatever by; then also what made all this, and is over."""
        self._follow_mentioned(without="__init__")
        self.called_names = frozenset(self._names)
        self._follow_mentioned()
        self._is_aside = True
        while self._of_classes:
            _, _, entry = self._of_classes.pop()
            for function in [entry] if isinstance(entry, types.FunctionType) else functions_in(entry):
                self._visit("", function)

    def _follow_mentioned(self, without: str = "") -> None:
        def is_due(key: str) -> bool:
            return key != without and (key == "__init__" or key in self._names or is_called_by_python(key))

        while due := [entry for entry in self._of_classes if is_due(entry[1])]:
            self._of_classes = [entry for entry in self._of_classes if not is_due(entry[1])]
            for base, key, entry in due:
                is_code = isinstance(entry, types.FunctionType) or functions_in(entry)
                if is_code or is_descriptor(entry) or is_data(key, entry):
                    self._note(f"{base.__name__}.{key}", base, key, entry)

    # -- functions ---------------------------------------------------------------------------------

    def _follow_function(self, function: types.FunctionType) -> bool:
        found, code = False, function.__code__
        is_read = is_own(function.__module__) or (
            is_users(function.__module__) and (self._ran is None or code in self._ran)
        )
        names = mentioned(code) if is_read else frozenset()
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self.holders[id(cell)] = f"{variable} ", cell
            found |= self._note_variable(function, names, variable, cell, "contents")
        if not is_read:
            return found
        self._names |= names
        self.codes.add(code)
        if vars(function):
            self._names_to.add_owner(vars(function), is_read_whole=True, is_own=True)
            found |= self._follow_holder(f"{function.__name__}.", vars(function))
        defaults = function.__defaults__ or ()
        named = code.co_varnames[: code.co_argcount][-len(defaults) :]
        given = dict(zip(named, defaults, strict=False)) | (function.__kwdefaults__ or {})
        if is_own(function.__module__):
            for part in ("__code__", "__defaults__", "__kwdefaults__"):
                self._note(f"{function.__name__}.{part}", function, part, getattr(function, part))
        for variable, default in given.items():
            found |= self._note(variable, (default,), 0, default)
        for variable in names_in(code, ("LOAD_GLOBAL", "LOAD_NAME")):
            if variable in function.__globals__:
                found |= self._note_variable(function, names, variable, function.__globals__, variable)
        for variable in names_in(code, ("IMPORT_NAME",)):
            for module in (variable, f"{function.__globals__.get('__package__')}.{variable}".rstrip(".")):
                found |= self._follow_python_module(function, names, variable, sys.modules.get(module))
        self._follow_assigned(function, function.__globals__, names_in(code, ("STORE_GLOBAL",)), "")
        return found

    def _note_variable(
        self, function: types.FunctionType, names: frozenset[str], variable: str, holder: Any, key: Any
    ) -> bool:
        value = item_of(holder, key)
        if isinstance(value, types.ModuleType):
            return self._follow_python_module(function, names, variable, value)
        return self._note(variable, holder, key, value)

    def _follow_python_module(
        self, function: types.FunctionType, names: frozenset[str], called: str, module: Any
    ) -> bool:
        """What a function's code mentions of a module of the user's: settings and other functions."""
        if not isinstance(module, types.ModuleType) or not is_own(module.__name__):
            return False
        own, found = vars(module), False
        self.attributes.setdefault(id(own), (f"{called}.", own))
        for name in sorted(names & own.keys()):
            if isinstance(own[name], types.ModuleType):
                found |= self._follow_python_module(function, names - {name}, f"{called}.{name}", own[name])
            else:
                found |= self._note(f"{called}.{name}", own, name, own[name])
        assigned = names & own.keys() & set(names_in(function.__code__, ("STORE_ATTR",)))
        self._follow_assigned(function, own, tuple(assigned), f"{called}.")
        return found

    def _follow_assigned(
        self, function: types.FunctionType, holder: dict[str, Any], names: Collection[str], prefix: str
    ) -> None:
        if names:
            self.holders[id(function), id(holder)] = prefix, PartOf(holder, names)

    # -- values ------------------------------------------------------------------------------------

    def _follow_holder(self, name: str, holder: Any) -> bool:
        self._seen[id(holder)] = holder
        items = items_of(holder)
        is_large = len(items) > _LARGE and all(isinstance(value, _PLAIN) for _, value in items)
        if is_large and isinstance(holder, tuple):
            return False
        if is_large and len(items) > _TOO_LARGE and not isinstance(holder, dict):
            why = f"has {len(items)} entries, too many to compare at every call: use a tuple or a tensor"
            self._closed.append((holder, WHOLE, name, why))
            return False
        if not isinstance(holder, tuple):
            self.holders[id(holder)] = name, holder
        found = False
        if (id(holder), WHOLE) in self._ignored:
            return False
        if is_large:
            if not self._is_aside:
                self.values.append((holder, WHOLE, item_of(holder, WHOLE), name.rstrip(". ")))
            return False
        for key, value in items:
            found |= self._note(
                f"{name}{key}" if isinstance(key, str) else f"{name}[{key}]", holder, key, value
            )
        return found

    def _note(self, name: str, holder: Any, key: Any, value: Any) -> bool:
        if (id(holder), key) in self._ignored or isinstance(value, types.ModuleType):
            return False
        if not self._is_aside:
            self._note_way(name, holder, key, _inside(value))
        self._note_end(holder, key, value)
        leads = self._visit(name, value) or (isinstance(value, torch.nn.Module) and not self._is_beside)
        if (self._is_aside and not leads) or self._noted.get((id(holder), key)) is holder:
            return leads
        self._noted[id(holder), key] = holder
        (self.watched if leads else self.values).append((holder, key, value, name))
        return leads

    def _note_end(self, holder: Any, key: Any, value: Any) -> None:
        """The containers that lead on from there: what is in it, and its attributes."""
        inside, way = _inside(value), self.ways.get(id(holder))
        if isinstance(inside, (*_CONTAINERS, *ARRAYS)) and not isinstance(inside, tuple):
            self.ways.setdefault(id(inside), Way(holder, key, _inside, way))
        elif not isinstance(value, _WITHOUT_WAYS) and hasattr(value, "__dict__"):
            self.ways.setdefault(id(vars(value)), Way(holder, key, vars, way))

    def _note_way(self, name: str, holder: Any, key: Any, value: Any) -> None:
        if isinstance(value, (*_CONTAINERS, *ARRAYS)):
            self._names_to.lead(holder, key, value)
        elif is_taken_from(value):
            why = f"is a {type(value).__name__}, which gives each thing once"
            self._closed.append((holder, key, name, why))
        elif is_closed(value):
            why = f"is a {type(value).__name__}, which nobody can look into"
            self._closed.append((holder, key, name, why))
        elif is_looked_through(type(value)) and hasattr(value, "__dict__"):
            self._names_to.lead(holder, key, vars(value))


def _inside(value: Any) -> Any:
    """The container that one of `collections` is wrapped around; anything else is itself."""
    if isinstance(value, UserDict | UserList):
        return value.data
    if isinstance(value, _VIEWS):
        value = value.mapping  # type: ignore[attr-defined]
    if isinstance(value, types.MappingProxyType):
        return gc.get_referents(value)[0]
    return value.maps if isinstance(value, ChainMap) else value


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether it lies at an address."""
    try:
        return tensor.layout is torch.strided and not tensor.is_nested and tensor.data_ptr() >= 0
    except (RuntimeError, ValueError):  # lazy, or of a subclass without memory of its own
        return False
