"""What a function reaches besides its arguments, and whether that has changed.

Note [Noticing changes]
A graph goes on doing what was captured. Before every call the wrapper compares, by identity, address and
geometry, the tensors that trial runs were seen to read, wherever the function reaches them (through itself,
closures, partials, defaults, the object of a bound method, globals that its code loads), the containers and
modules on the way to them, and the hooks of modules. These are a few comparisons in C for every tensor, where
replaying a kernel on it takes a microsecond. Everything else that Python code may look at (numbers,
functions, settings) is compared in debug mode only.

Note [What was added]
What stands where it stood says nothing about what came to stand beside it: a layer that was appended, a
number in a dictionary, an attribute that code asks for with `hasattr`. So the sizes of containers count too.
An attribute that no code mentions counts for nothing, and neither does a container that none mentions, where
a trainer keeps his results.

Note [Python state]
A replay runs no Python: what a function assigns stays as it was. What it assigns in every call is put back
after trial runs; what it assigns in the first call alone was made once, and stays.
"""

import dis
import functools
import logging
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from ..checking.addresses import moved_error
from ..memory import storage_address
from ..trees import tensors_in
from ..trimming import same_constant
from .holders import PartOf, drop, identity, item_of, items_of, put, slots_of
from .standing import Comparison

logger = logging.getLogger("ostinato.graphs")

_MOST_OBJECTS = 50_000
_LARGE = 256
_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
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
_address, _size, _stride = torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride
_training, _dtype = attrgetter("training"), attrgetter("dtype")
_MISSING = object()

Key = tuple[int, Any]
"""A holder by identity, and a place in it."""


class Reached:
    """A snapshot of what functions reach."""

    def __init__(
        self, *roots: Any, reads: Collection[int] | None = None, ignored: Collection[Key] = ()
    ) -> None:
        """`roots`: the function, and others that it is given. `reads`: addresses of the storages that count;
        None: all. `ignored`: what the function changes itself."""
        self._reads, self._ignored = reads, ignored
        self.modules: list[torch.nn.Module] = []
        self._watched: list[tuple[Any, Any, Any, str]] = []
        self._values: list[tuple[Any, Any, Any, str]] = []
        self._holders: dict[Any, tuple[str, Any]] = {}
        self._seen: dict[int, Any] = {}  # holds what was seen: identities must not be used again meanwhile
        self._leads: set[int] = set()
        self._is_beside = False
        """Inside a module that another one merely refers to: of that, only what is read counts."""
        self._methods: list[tuple[str, types.FunctionType]] = []
        self._names: set[str] = set()
        """All that code which was followed mentions: a method is called by its name."""
        self._of_objects: set[int] = set()
        """Attributes of objects that are no modules, by identity."""
        self._of_modules: set[int] = set()
        # What may grow, see Note [What was added]: tables of modules, attributes, and other containers with
        # the name of the attribute that they are, or are in.
        self._tables: list[dict[str, Any]] = []
        self._attributes: dict[int, dict[str, Any]] = {}
        self._containers: dict[int, tuple[str, Any]] = {}
        self._attribute = ""
        self._is_aside = False
        """Inside a method that nobody calls by name: of that, only tensors count."""
        for root in roots:
            self._visit("", root)
        self._follow_methods()
        if len(self._seen) > _MOST_OBJECTS:
            logger.warning("more than %d objects are reached: not all are watched", _MOST_OBJECTS)
        self._seen.clear()
        self._saved = [(name, holder, dict(items_of(holder))) for name, holder in self._holders.values()]
        found = [value for _, _, value, _ in self._watched]
        self.tensors = [value for value in found if isinstance(value, torch.Tensor) and _has_memory(value)]
        self._geometry, self._code = _geometry_of(self.tensors), self._code_now()
        self._num_layers = list(map(len, self._tables))
        self._looks = list(_grouped(self._watched))
        self._value_looks = list(_grouped(self._values))
        self._values_then = list(chain.from_iterable(values for _, values in self._value_looks))

    # -- before every call -------------------------------------------------------------------------

    def is_unchanged(self) -> bool:
        """Whether everything that is read, and all on the way to it, is the same in the same place."""
        try:
            return (
                all(all(map(is_, look(), values)) for look, values in self._looks)
                and self._geometry == _geometry_of(self.tensors)
                and self._num_layers == list(map(len, self._tables))
            )
        except (LookupError, ReferenceError, RuntimeError):  # it is gone
            return False

    def is_same_code(self) -> bool:
        """Whether modules have the classes, hooks and methods that they had."""
        now = self._code_now()
        return len(now) == len(self._code) and all(map(is_, now, self._code))

    def training(self) -> list[bool]:
        """Which modules are in training mode."""
        return list(map(_training, self.modules))

    def changed_values(self) -> list[str]:
        """The names of other Python values that are others now: in debug mode, and of training steps."""
        try:
            found = chain.from_iterable([look() for look, _ in self._value_looks])
            if all(map(is_, found, self._values_then)):
                return []
        except (LookupError, ReferenceError):  # it is gone
            pass
        return [
            name
            for h, key, value, name in self._values
            if not same_constant(item_of(h, key), value) and not self._is_kept(h, key, value)
        ]

    # -- before every replay of a training step ----------------------------------------------------

    def standing(self, without: Collection[int] = ()) -> Callable[[], bool]:
        """A function that tells, in a few ten microseconds, whether all that Python code may look at is as
        it is now: values, tensors by identity and address, modules with their kinds, hooks and modes.
        `without`: dictionaries, by identity, that somebody else looks after."""
        found = Comparison()
        found.add_places(
            (h, key, value) for h, key, value, _ in self._values if not self._is_kept(h, key, value)
        )
        used = self._used(without)
        found.add_places((holder, key, value) for holder, key, value, _ in used)
        tensors = [value for _, _, value, _ in used if isinstance(value, torch.Tensor) and _has_memory(value)]
        if tensors:
            found.add_equal(lambda: list(map(_address, tensors)))
        for table in (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks):
            found.add_equal(functools.partial(list, table.values()))
        found.add_equal(functools.partial(_all_types, self.modules))
        for module in self.modules:
            _add_module(found, module)
        counted = [*self._tables, *self._attributes.values(), *self._counted()]
        found.add_equal(lambda: list(map(len, counted)))
        return found.compiled()

    def added(self) -> list[str]:
        """The names of what was not there, see Note [What was added]."""
        then = {id(holder): (name, saved) for name, holder, saved in self._saved}
        own = {owner for owner, _ in self._ignored}
        found = []
        for holder in (*self._tables, *(each for each in self._counted() if id(each) not in own)):
            name, saved = then[id(holder)]
            found += [f"{name}{key}" for key in dict(items_of(holder)).keys() - saved.keys()]
        for holder in self._attributes.values():
            name, saved = then[id(holder)]
            new = (holder.keys() - saved.keys()) & self._called_names
            found += [f"{name}{key}" for key in new if (id(holder), key) not in self._ignored]
        return sorted(found)

    def _counted(self) -> list[Any]:
        return [each for name, each in self._containers.values() if not name or name in self._called_names]

    def replaced(self, without: Collection[int] = ()) -> list[str]:
        """The names of tensors and modules that others stand for now, or that have moved."""
        moved = {id(t) for t, at in zip(self.tensors, self._geometry[0], strict=True) if t.data_ptr() != at}
        return [
            name
            for holder, key, value, name in self._used(without)
            if item_of(holder, key) is not value or id(value) in moved
        ]

    def _used(self, without: Collection[int]) -> list[tuple[Any, Any, Any, str]]:
        """Tensors and what leads to them."""
        return [
            entry for entry in self._watched if id(entry[0]) not in without and not self._is_kept(*entry[:3])
        ]

    def _is_kept(self, holder: Any, key: Any, value: Any) -> bool:
        """Whether it is a result, or the place for one, that an object keeps and no code mentions."""
        is_result = value is None or isinstance(value, torch.Tensor)
        return is_result and id(holder) in self._of_objects and key not in self._called_names

    def check(self) -> None:
        """Raise AddressError, naming what has moved or was replaced."""
        if self.is_unchanged():
            return
        geometry = dict(zip(map(id, self.tensors), zip(*self._geometry, strict=True), strict=True))
        changed = []
        for holder, key, value, name in self._watched:
            if item_of(holder, key) is not value:
                changed.append(f"{name} (replaced)")
            elif id(value) in geometry and geometry[id(value)] != next(
                zip(*_geometry_of([value]), strict=True)
            ):
                changed.append(f"{name} (moved)")
        if self._num_layers != list(map(len, self._tables)):
            changed.append("a module that layers were added to")
        raise moved_error(changed or ["something that the step reads"])

    # -- around trial runs -------------------------------------------------------------------------

    def changed(self) -> set[Key]:
        """Where something else stands now, or nothing any more, or something that did not."""
        found = set()
        for _, holder, saved in self._saved:
            now = dict(items_of(holder))
            for key in {**saved, **now}:
                if now.get(key, _MISSING) is not saved.get(key, _MISSING):
                    found.add((identity(holder), key))
        return found

    def assigned(self) -> "Assigned":
        """Where tensors stand now that did not stand there."""
        places = []
        for name, holder, saved in self._saved:
            for key, value in items_of(holder):
                was = saved.get(key, _MISSING)
                if value is not was and tensors_in(value):
                    places.append((f"{name}{key}", holder, key, was))
        return Assigned(places)

    def put_back(self, keys: Collection[Key]) -> None:
        """Undo assignments at these places, and at no others: somebody else may have made those."""
        for _, holder, saved in self._saved:
            if isinstance(holder, list | deque):
                if any(owner == id(holder) for owner, _ in keys):
                    holder.clear()
                    holder.extend(saved.values())
                continue
            for key, now in items_of(holder):
                if (identity(holder), key) in keys and key not in saved:
                    drop(holder, key)
                elif (identity(holder), key) in keys and now is not saved[key]:
                    put(holder, key, saved[key])
            for key in saved.keys() - dict(items_of(holder)).keys():
                if (identity(holder), key) in keys:
                    put(holder, key, saved[key])

    # -- internals ---------------------------------------------------------------------------------

    def _code_now(self) -> list[Any]:
        tables = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
        found: list[Any] = list(chain.from_iterable(table.values() for table in tables))
        for module in self.modules:
            own = vars(module)
            found += (type(module), own.get("forward"))
            for hooks in _HOOKS:
                found += own.get(hooks, {}).values()
        return found

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
            return self._reads is None or (_has_memory(value) and storage_address(value) in self._reads)
        if isinstance(value, weakref.ProxyType | weakref.CallableProxyType):
            return False
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
            self._containers[id(value)] = self._attribute, value
            found = self._follow_holder(name, value)
            if self._is_aside or id(value) not in self._holders:
                del self._containers[id(value)]
            return found
        if _is_users(type(value).__module__):
            found = False
            if hasattr(value, "__dict__"):
                self._of_objects.add(id(vars(value)))
                if not self._is_aside:
                    self._attributes[id(vars(value))] = vars(value)
                found = self._follow_holder(f"{name}.", vars(value))
            found |= self._follow_holder(f"{name}.", value) if slots_of(value) else False
            self._follow_class(type(value))
            return found
        return False

    def _follow_module(self, name: str, module: torch.nn.Module) -> bool:
        self.modules.append(module)
        prefix, own = f"{name}." if name else "", vars(module)
        self._follow_class(type(module))
        for hook in chain.from_iterable(own.get(hooks, {}).values() for hooks in _HOOKS):
            self._visit("", hook)
        found = False
        for table in (own[table] for table in _TABLES if type(own.get(table)) is dict):  # not in TorchScript
            found |= self._follow_holder(prefix, table)
        if (found or not self._is_beside) and _may_grow(module):
            self._tables += [own[table] for table in _TABLES if type(own.get(table)) is dict]
        self._holders[id(own)] = prefix, own
        self._of_modules.add(id(own))
        if _is_users(type(module).__module__) and not self._is_aside:
            self._attributes[id(own)] = own
        before, self._is_beside = self._is_beside, True
        for key in own.keys() - _OF_EVERY_MODULE:
            found |= self._note(f"{prefix}{key}", own, key, own[key])
        self._is_beside = before
        return found

    def _follow_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if _is_users(base.__module__) and id(base) not in self._seen:
                self._seen[id(base)] = base
                self._holders[id(base)] = f"{base.__name__}.", base
                own = vars(base).items()
                self._methods += [(key, each) for key, each in own if isinstance(each, types.FunctionType)]

    def _follow_methods(self) -> None:
        """Those of classes on the way: first all that may be called, whatever by."""
        self._follow_called(besides="__init__")  # which made what is here, and is over
        self._called_names = frozenset(self._names)
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
            self._holders[id(cell)] = f"{variable} ", cell
            found |= self._note(variable, cell, "contents", item_of(cell, "contents"))
        if not _is_users(function.__module__):
            return found
        self._names |= _mentioned(function.__code__)
        defaults = function.__defaults__ or ()
        named = function.__code__.co_varnames[: function.__code__.co_argcount][-len(defaults) :]
        given = dict(zip(named, defaults, strict=False)) | (function.__kwdefaults__ or {})
        for variable, default in given.items():
            found |= self._note(variable, (default,), 0, default)
        for variable in _names_in(function.__code__, ("LOAD_GLOBAL", "LOAD_NAME")):
            if variable in function.__globals__:
                found |= self._note(variable, function.__globals__, variable, function.__globals__[variable])
        assigned = _names_in(function.__code__, ("STORE_GLOBAL",))
        if assigned:
            part = PartOf(function.__globals__, assigned)
            self._holders[id(function), 0] = "", part
        return found

    def _follow_holder(self, name: str, holder: Any) -> bool:
        self._seen[id(holder)] = holder
        items = items_of(holder)
        if len(items) > _LARGE and all(isinstance(value, _PLAIN) for _, value in items):
            return False  # a vocabulary
        if not isinstance(holder, tuple):
            self._holders[id(holder)] = name, holder
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
        if id(holder) in self._of_objects or id(holder) in self._of_modules:
            self._attribute = key
        elif id(holder) not in self._containers:  # a variable, which the code that is followed mentions
            self._attribute = ""
        leads = self._visit(name, value) or (isinstance(value, torch.nn.Module) and not self._is_beside)
        self._attribute = before
        if self._is_aside and not leads:
            return False
        (self._watched if leads else self._values).append((holder, key, value, name))
        return leads


class Assigned:
    """Places that a function assigns tensors to: results of another kind, which a replay hands out there."""

    def __init__(self, places: list[tuple[str, Any, Any, Any]]) -> None:
        self.places = places
        """Name, holder, key, and what stood there before."""

    def __bool__(self) -> bool:
        return bool(self.places)

    def keys(self) -> set[Key]:
        """The places."""
        return {(identity(holder), key) for _, holder, key, _ in self.places}

    @property
    def names(self) -> list[str]:
        """Of all places; of a list once, whatever was put into it."""
        return [
            name.removesuffix(str(key)) if isinstance(holder, list | deque) else name
            for name, holder, key, _ in self.places
        ]

    def besides(self, keys: Collection[Key]) -> list[str]:
        """The names of other places than these."""
        return [name for name, holder, key, _ in self.places if (identity(holder), key) not in keys]

    def carried_on(self, reads: Collection[int]) -> str | None:
        """A place whose former tensor was used (its storage is among `reads`), or that is in a list or is a
        parameter or buffer: state that is kept by assignment, which no replay would carry on."""
        for name, holder, _, was in self.places:
            if isinstance(holder, list | deque) or isinstance(was, torch.nn.Parameter | torch.nn.Buffer):
                return name
            if was is not _MISSING and any(storage_address(t) in reads for t in tensors_in(was)):
                return name
        return None

    def goes_on_from_former(self, reads: Collection[int], tables: Collection[int]) -> str | None:
        """A place whose former tensor was used, or that is in one of these tables (buffers, by identity), and
        where other memory stands now."""
        for name, holder, key, was in self.places:
            former = {storage_address(tensor) for tensor in ([] if was is _MISSING else tensors_in(was))}
            now = {storage_address(tensor) for tensor in tensors_in(item_of(holder, key))}
            if not now <= former and (id(holder) in tables or not former.isdisjoint(reads)):
                return name
        return None

    def without_former(self) -> "Assigned":
        """The places alone: what stood there is free to go."""
        return Assigned([(name, holder, key, None) for name, holder, key, _ in self.places])

    def storages(self) -> set[int]:
        """Where the tensors that stand there now have their memory."""
        values = (item_of(holder, key) for _, holder, key, _ in self.places)
        return {storage_address(tensor) for value in values for tensor in tensors_in(value)}

    def with_result(self, result: Any) -> tuple[Any, list[Any]]:
        """The function's result, and what stands in these places now."""
        return result, [item_of(holder, key) for _, holder, key, _ in self.places]

    def put(self, served: tuple[Any, list[Any]]) -> Any:
        """Let what a replay made stand there; the result."""
        result, values = served
        for (_, holder, key, _), value in zip(self.places, values, strict=True):
            put(holder, key, value)
        return result


def _grouped(entries: list[tuple[Any, Any, Any, str]]) -> Iterator[tuple[Callable[[], Any], list[Any]]]:
    """How to look entries up, and what was found; those of one dictionary are looked up together."""
    of_holder: dict[int, list[Any]] = {}
    for entry in entries:
        of_holder.setdefault(id(entry[0]), []).append(entry)
    for group in of_holder.values():
        holder, keys = group[0][0], [key for _, key, _, _ in group]
        values = [value for _, _, value, _ in group]
        if isinstance(holder, dict) and len(keys) > 1:
            yield functools.partial(itemgetter(*keys), holder), values
        else:
            yield functools.partial(_all_items, holder, keys), values


def _all_types(modules: list[torch.nn.Module]) -> list[type]:
    return list(map(type, modules))


def _add_module(found: Comparison, module: torch.nn.Module) -> None:
    """Its mode, its hooks, and whether it has a `forward` of its own."""
    own = vars(module)
    if "training" in own:
        found.add_places([(own, "training", own["training"])])
    else:  # TorchScript
        found.add_equal(lambda: module.training)
    for hooks in _HOOKS:
        if own.get(hooks):
            found.add_equal(lambda hooks=hooks: list(own[hooks].values()))  # type: ignore[misc]
        elif hooks in own:
            found.add_empty(own, hooks)
    if "forward" in own:
        found.add_places([(own, "forward", own["forward"])])
    else:
        found.add_missing(own, "forward")


def _may_grow(module: torch.nn.Module) -> bool:
    """Whether what is added to it may change what it does: not to a layer of torch's own."""
    of_torch = type(module).__module__.startswith("torch.nn.")
    return not of_torch or bool(module._modules) or isinstance(module, _CONTAINERS)


def _geometry_of(tensors: list[torch.Tensor]) -> tuple[list[Any], ...]:
    return tuple(list(map(question, tensors)) for question in (_address, _size, _stride, _dtype))


def _all_items(holder: Any, keys: list[Any]) -> list[Any]:
    return [item_of(holder, key) for key in keys]


@functools.cache
def _names_in(code: types.CodeType, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Names in instructions of these kinds of a function's code, functions defined inside it included."""
    found = [step.argval for step in dis.get_instructions(code) if step.opname in kinds]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += _names_in(constant, kinds)
    return tuple(dict.fromkeys(found))


@functools.cache
def _mentioned(code: types.CodeType) -> frozenset[str]:
    """Names and texts in a function's code, functions defined inside it included."""
    found = {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
    inside = (_mentioned(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(found.union(*inside))


def _is_users(module: str | None) -> bool:
    return (module or "").partition(".")[0] not in _NOT_USERS


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return tensor.layout is torch.strided and not tensor.is_nested and tensor.data_ptr() >= 0
    except (RuntimeError, ValueError):  # lazy, or of a subclass without memory of its own
        return False
