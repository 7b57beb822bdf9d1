"""Whose code is looked into, and what a class or a module of it defines.

Code of torch, transformers and the standard library is not read. Code of installed packages is, but what they
keep for themselves, in caches and registries of their modules, is their own business.
"""

import argparse
import functools
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any, Generic, Protocol

import torch

from .code_names import mentioned, names_in
from .holders import slots_of

_NOT_USERS = {*sys.stdlib_module_names, "torch", "numpy", "ostinato", "transformers"} - {"__main__"}
_INSTALLED = ("site-packages", "dist-packages")
_CONTAINERS = (
    torch.nn.ModuleList,
    torch.nn.ModuleDict,
    torch.nn.Sequential,
    torch.nn.ParameterList,
    torch.nn.ParameterDict,
)
_BASES = frozenset((object, torch.nn.Module, Generic, Protocol, *_CONTAINERS))
"""Their code reads no attribute but those that every module has."""
NAMESPACES = (types.SimpleNamespace, argparse.Namespace, threading.local)
"""Attributes and nothing else."""
_TAKEN_FROM = frozenset(
    ("_io._IOBase", "_queue.SimpleQueue", "socket.socket", "multiprocessing.connection._ConnectionBase")
) | frozenset(("multiprocessing.queues.Queue", "multiprocessing.queues.SimpleQueue"))
"""What gives everything once, besides iterators."""
_CONFIGS = ("PretrainedConfig", "PreTrainedConfig")
"""What transformers' modules look at in every call."""
_MAKES_OR_SHOWS = frozenset(
    ("__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__", "__del__")
) | frozenset(("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__"))
"""Methods that Python calls on its own, but in no call of a finished object."""
_BY_TORCH = frozenset(("forward", "backward", "setup_context", "jvp"))
"""Of modules and of functions with a derivative of their own."""


def is_users(module: str | None) -> bool:
    """Whether code of this module is read: anybody's but torch's and Python's."""
    return (module or "").partition(".")[0] not in _NOT_USERS


def is_own(module: str | None) -> bool:
    """Whether it is the user's own, not an installed package's."""
    package = (module or "").partition(".")[0]
    return is_users(module) and (package == "__main__" or not _is_installed(package))


@functools.cache
def _is_installed(package: str) -> bool:
    module = sys.modules.get(package)
    places = [getattr(module, "__file__", None) or "", *(getattr(module, "__path__", None) or ())]
    return any(part in place for place in places for part in _INSTALLED)


def is_read_whole(kind: type) -> bool:
    """Whether all code is read that may look at attributes of such an object."""
    return issubclass(kind, NAMESPACES) or all(
        base in _BASES or is_users(base.__module__) for base in kind.__mro__
    )


def is_looked_through(kind: type) -> bool:
    """Whether all attributes of such an object count although its code is not read: a logits processor of
    transformers, an event of `threading`, a distribution of torch."""
    package = (kind.__module__ or "").partition(".")[0]
    if package == "torch":
        return kind.__module__.startswith("torch.distributions.")
    return package == "transformers" or (package in sys.stdlib_module_names and package != "logging")


def is_namespace(value: Any) -> bool:
    """Whether it only holds settings, though no user wrote its class."""
    return isinstance(value, NAMESPACES) or any(base.__name__ in _CONFIGS for base in type(value).__mro__)


def is_taken_from(value: Any) -> bool:
    """Whether it gives each thing once, and nothing tells what it would give next: an iterator, a generator,
    a file, a queue. Not one whose class is the user's: that is looked into."""
    kind = type(value)
    if any(value is stream for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)):
        return False
    if isinstance(value, Iterator):
        return not (is_users(kind.__module__) and (hasattr(value, "__dict__") or bool(slots_of(value))))
    return any(f"{base.__module__}.{base.__qualname__}" in _TAKEN_FROM for base in kind.__mro__)


def is_closed(value: Any) -> bool:
    """Returns whether nobody can look into it: an object of an extension in C, without attributes."""
    kind = type(value)
    package = (kind.__module__ or "").partition(".")[0]
    if package in sys.builtin_module_names or not is_users(kind.__module__) or callable(value):
        return False
    return not hasattr(value, "__dict__") and not any("__slots__" in vars(base) for base in kind.__mro__)


def may_grow(module: torch.nn.Module) -> bool:
    """Whether what is added to it may change what it does: not to a layer of torch's own."""
    of_torch = type(module).__module__.startswith("torch.nn.")
    return not of_torch or bool(module._modules) or isinstance(module, _CONTAINERS)


def is_called_by_python(name: str) -> bool:
    """Whether a method of this name runs though no code mentions it: Python or torch calls it."""
    return name in _BY_TORCH or (name.startswith("__") and name not in _MAKES_OR_SHOWS)


def functions_in(entry: Any) -> list[Any]:
    """The functions behind an entry of a class or a module that is no plain function: methods of a class,
    properties, cached functions."""
    if isinstance(entry, staticmethod | classmethod):
        return [entry.__func__]
    if isinstance(entry, property):
        return [each for each in (entry.fget, entry.fset) if each is not None]
    if isinstance(entry, functools.cached_property | functools.partialmethod):
        return [entry.func]
    wrapped = getattr(entry, "__dict__", {}).get("__wrapped__") if callable(entry) else None
    return [wrapped] if isinstance(wrapped, types.FunctionType) else []


def read_by_methods(kind: type, called: frozenset[str]) -> frozenset[str]:
    """These names, and what methods of such names mention that only read: a scheduler's `get_last_lr`."""
    entries = {name: entry for base in reversed(kind.__mro__) for name, entry in vars(base).items()}
    found = [entries[name] for name in called & entries.keys()]
    functions = [each for entry in found for each in (functions_in(entry) or [entry])]
    codes = [each.__code__ for each in functions if isinstance(each, types.FunctionType)]
    return called.union(*(mentioned(code) for code in codes if not names_in(code, ("STORE_ATTR",))))


def is_descriptor(entry: Any) -> bool:
    """Whether an entry of a class is a descriptor of a class that is read."""
    return hasattr(type(entry), "__get__") and is_users(type(entry).__module__)


def is_data(name: str, entry: Any) -> bool:
    """Whether an entry of a class is a value that its code may read."""
    is_code = isinstance(entry, types.FunctionType | type) or bool(functions_in(entry))
    return not name.startswith("__") and name != "_abc_impl" and not is_code and not hasattr(entry, "__get__")
