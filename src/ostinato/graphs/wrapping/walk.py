"""The way from a function to all that it reaches: tensors, the containers and modules on the way to them,
and what else its code may look at."""

import functools
import logging
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import chain
from typing import Any

import torch

from ..memory import storage_address
from .code_names import mentioned, names_in
from .holders import Key, PartOf, item_of, items_of, slots_of

logger = logging.getLogger("ostinato.graphs")

_MOST_OBJECTS = 50_000
_LARGE = 256
_TABLES = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Where a module keeps them."""
_HOOKS_OF_GRADIENTS = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
"""Where modules and tensors keep those that a backward pass calls."""
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_NOT_USERS = {*sys.stdlib_module_names, "torch", "numpy", "ostinato", "transformers"} - {"__main__"}
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type,
    torch.dtype,
    torch.device,
    types.ModuleType,
)
_CONTAINERS = (
    torch.nn.ModuleList,
    torch.nn.ModuleDict,
    torch.nn.Sequential,
    torch.nn.ParameterList,
    torch.nn.ParameterDict,
)


class Walk:
    """From these roots."""

    def __init__(
        self,
        roots: Iterable[Any],
        reads: Collection[int] | None,
        ignored: Collection[Key],
        with_hooks_of: Callable[[Any], bool] | None,
    ) -> None:
        """As `Reached`."""
        self._reads, self._ignored, self._with_hooks_of = reads, ignored, with_hooks_of
        self.modules: list[torch.nn.Module] = []
        self.watched: list[tuple[Any, Any, Any, str]] = []
        self.values: list[tuple[Any, Any, Any, str]] = []
        self.holders: dict[Any, tuple[str, Any]] = {}
        self._seen: dict[int, Any] = {}  # holds what was seen: identities must not be used again meanwhile
        self._leads: set[int] = set()
        self._is_beside = False
        """Inside a module that another one merely refers to: of that, only what is read counts."""
        self._methods: list[tuple[str, types.FunctionType]] = []
        self._names: set[str] = set()
        """All that code which was followed mentions: a method is called by its name."""
        self.of_objects: set[int] = set()
        """Attributes of objects that are no modules, by identity."""
        self.of_bound: set[int] = set()
        """Those of objects whose methods are followed: what else is in them is read by these methods."""
        self._of_modules: set[int] = set()
        # What may grow, see Note [What was added] in reached.py: tables of modules, attributes, and other
        # containers with the name of the attribute that they are, or are in.
        self.tables: list[dict[str, Any]] = []
        self.attributes: dict[int, dict[str, Any]] = {}
        self.containers: dict[int, tuple[str, Any]] = {}
        self._attribute = ""
        self._is_aside = False
        """Inside a method that nobody calls by name: of that, only tensors count."""
        for root in roots:
            self._visit("", root)
        self._follow_methods()
        if len(self._seen) > _MOST_OBJECTS:
            logger.warning("more than %d objects are reached: not all are watched", _MOST_OBJECTS)
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
        if isinstance(value, torch.nn.Module):
            return self._follow_module(name, value)
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
            return self._follow_holder(f"{name}.state", value.state)
        if isinstance(value, dict | list | tuple | deque):
            self.containers[id(value)] = self._attribute, value
            is_named = isinstance(value, dict) and bool(name)
            found = self._follow_holder(f"{name}." if is_named else name, value)
            if self._is_aside or id(value) not in self.holders:
                del self.containers[id(value)]
            return found
        if _is_users(type(value).__module__):
            found = False
            if hasattr(value, "__dict__"):
                self.of_objects.add(id(vars(value)))
                if not self._is_aside:
                    self.attributes[id(vars(value))] = vars(value)
                found = self._follow_holder(f"{name}.", vars(value))
            found |= self._follow_holder(f"{name}.", value) if slots_of(value) else False
            self._follow_class(type(value))
            return found
        return False

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
        if (found or not self._is_beside) and _may_grow(module):
            self.tables += [own[table] for table in _TABLES if type(own.get(table)) is dict]
        self.holders[id(own)] = prefix, own
        self._of_modules.add(id(own))
        if _is_users(type(module).__module__) and not self._is_aside:
            self.attributes[id(own)] = own
        before, self._is_beside = self._is_beside, True
        for key in own.keys() - _OF_EVERY_MODULE:
            found |= self._note(f"{prefix}{key}", own, key, own[key])
        self._is_beside = before
        return found

    def _follow_hooks_of_gradients(self, owner: Any) -> None:
        for hooks in (
            _HOOKS_OF_GRADIENTS if self._with_hooks_of is not None and self._with_hooks_of(owner) else ()
        ):
            for hook in (getattr(owner, hooks, None) or {}).values():
                self._visit("", hook)

    def _follow_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if _is_users(base.__module__) and id(base) not in self._seen:
                self._seen[id(base)] = base
                self.holders[id(base)] = f"{base.__name__}.", base
                own = vars(base).items()
                self._methods += [(key, each) for key, each in own if isinstance(each, types.FunctionType)]

    def _follow_methods(self) -> None:
        """Those of classes on the way: first all that may be called, whatever by."""
        self._follow_called(besides="__init__")  # which made what is here, and is over
        self.called_names = frozenset(self._names)
        self._follow_called()
        self._is_aside = True
        while self._methods:
            self._visit("", self._methods.pop()[1])

    def _follow_called(self, besides: str = "") -> None:
        while called := [e for e in self._methods if self._may_be_called(e[0]) and e[0] != besides]:
            self._methods = [entry for entry in self._methods if entry not in called]
            for _, function in called:
                self._visit("", function)

    def _may_be_called(self, name: str) -> bool:
        return name == "forward" or name.startswith("__") or name in self._names

    def _follow_function(self, function: types.FunctionType) -> bool:
        found = False
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.holders[id(cell)] = f"{variable} ", cell
            found |= self._note(variable, cell, "contents", item_of(cell, "contents"))
        if not _is_users(function.__module__):
            return found
        self._names |= mentioned(function.__code__)
        defaults = function.__defaults__ or ()
        named = function.__code__.co_varnames[: function.__code__.co_argcount][-len(defaults) :]
        given = dict(zip(named, defaults, strict=False)) | (function.__kwdefaults__ or {})
        for variable, default in given.items():
            found |= self._note(variable, (default,), 0, default)
        for variable in names_in(function.__code__, ("LOAD_GLOBAL", "LOAD_NAME")):
            if variable in function.__globals__:
                found |= self._note(variable, function.__globals__, variable, function.__globals__[variable])
        assigned = names_in(function.__code__, ("STORE_GLOBAL",))
        if assigned:
            part = PartOf(function.__globals__, assigned)
            self.holders[id(function), 0] = "", part
        return found

    def _follow_holder(self, name: str, holder: Any) -> bool:
        self._seen[id(holder)] = holder
        items = items_of(holder)
        if len(items) > _LARGE and all(isinstance(value, _PLAIN) for _, value in items):
            return False  # a vocabulary
        if not isinstance(holder, tuple):
            self.holders[id(holder)] = name, holder
        found = False
        for key, value in items:
            found |= self._note(
                f"{name}{key}" if isinstance(key, str) else f"{name}[{key}]", holder, key, value
            )
        return found

    def _note(self, name: str, holder: Any, key: Any, value: Any) -> bool:
        if (id(holder), key) in self._ignored or isinstance(value, types.ModuleType):
            return False
        before = self._attribute
        if id(holder) in self.of_objects or id(holder) in self._of_modules:
            self._attribute = key
        elif id(holder) not in self.containers:  # a variable, which the code that is followed mentions
            self._attribute = ""
        leads = self._visit(name, value) or (isinstance(value, torch.nn.Module) and not self._is_beside)
        self._attribute = before
        if self._is_aside and not leads:
            return False
        (self.watched if leads else self.values).append((holder, key, value, name))
        return leads


def _may_grow(module: torch.nn.Module) -> bool:
    """Whether what is added to it may change what it does: not to a layer of torch's own."""
    of_torch = type(module).__module__.startswith("torch.nn.")
    return not of_torch or bool(module._modules) or isinstance(module, _CONTAINERS)


def _is_users(module: str | None) -> bool:
    return (module or "").partition(".")[0] not in _NOT_USERS


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether it lies at an address."""
    try:
        return tensor.layout is torch.strided and not tensor.is_nested and tensor.data_ptr() >= 0
    except (RuntimeError, ValueError):  # lazy, or of a subclass without memory of its own
        return False
