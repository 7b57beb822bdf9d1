"""What a function reaches besides its arguments, and whether that has changed.

Note [Noticing changes]
A graph keeps doing what was captured. Before every call the wrapper compares, by identity, address and
geometry, the tensors that trial runs read, wherever the function reaches them (through itself, closures,
partials, defaults, the object of a bound method, globals that its code loads), the containers and modules on
the way to them, and the hooks of modules. That takes a few comparisons in C per tensor, while replaying a
kernel on it takes a microsecond. Everything else that Python code may read (numbers, functions, settings) is
compared by identity and, if that differs, by value. All of it is one compiled expression (`standing`); only
if that fails are things compared one by one.

Note [What was added]
Unchanged entries do not show what was added beside them: an appended layer, a number in a dictionary, an
attribute that code looks up with `hasattr`. So the sizes of containers are compared too. Attributes and
containers that no code mentions, such as a trainer's list of results, do not count. A container that the
function itself was seen to fill, a memo, may grow.

Note [Python state]
A replay runs no Python, so what a function assigns does not change. What it assigns in every call is restored
after trial runs; what it assigns only in the first call was created once, and stays.
"""

import functools
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import CellType, CodeType
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from ..blame import line_using
from ..checking.addresses import moved_error
from ..trees import tensors_in
from ..trimming import same_constant
from .code_names import accumulates, environment_now, is_read_from, looks_at, named_in
from .effects import Change, Effects
from .holders import ARRAYS, MISSING, WHOLE, Key, PartOf, drop, identity, item_of, items_of, put
from .standing import Comparison
from .user_code import is_called_by_python
from .walk import HOOKS, Walk, has_memory
from .ways import BY_ANY_NAME
from .words import Words

_address, _size, _stride = torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride
_dtype_now, _precision_now = torch.get_default_dtype, torch._C._get_float32_matmul_precision
_deterministic_now = torch._C._get_deterministic_algorithms
_flash, _efficient = torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled
_math, _cudnn = torch._C._get_math_sdp_enabled, torch._C._get_cudnn_sdp_enabled
_BY_MADE_UP_NAMES = frozenset(("setattr", "vars", "__dict__", "__setattr__"))
"""Code that mentions these may assign an attribute whose name it does not mention."""
_ASK_FOR_ENVIRONMENT = frozenset(("environ", "environb", "getenv", "getenvb"))
_training, _dtype = attrgetter("training"), attrgetter("dtype")


class Reached:
    """A snapshot of what functions reach."""

    def __init__(
        self,
        *roots: Any,
        reads: Collection[int] | None = None,
        ignored: Collection[Key] = (),
        growing: Collection[int] = (),
        with_hooks_of: Callable[[Any], bool] | None = None,
        ran: Collection[CodeType] | None = None,
        environment: Collection[Any] | None = (),
    ) -> None:
        """`roots`: the function, and others that it is given. `reads`: addresses of the storages that count;
        None: all. `ignored`: what the function changes itself. `growing`: containers, by identity, that
        the function adds to. `with_hooks_of`: whose hooks of gradients count. `ran`: what counts of the code
        of installed packages; None: all. `environment`: the environment variables that count; None: all, if
        code mentions them."""
        self._ignored = ignored
        walk = Walk(roots, reads, ignored, with_hooks_of, ran)
        self.modules = walk.modules
        self.closed = walk.closed
        """What code may use although nobody can compare or undo it, and why: names and causes."""
        self._codes, self._objects = walk.codes, walk.objects
        self._watched, self._numerics = walk.watched, numerics()
        self._of_objects, self._called_names = walk.of_objects, walk.called_names
        self._of_bound = walk.of_bound
        self._tables, self._growing, self._containers = walk.tables, walk.growing, walk.containers
        self._ways = walk.ways
        self._attributes = [(who, *named, frozenset(named[1])) for who, named in walk.attributes.items()]
        self._not_growing = {owner for owner, _ in ignored} | set(growing)
        self._values = [
            entry for entry in walk.values if entry[1] is not WHOLE or id(entry[0]) not in self._not_growing
        ]
        if environment is not None or not _ASK_FOR_ENVIRONMENT.isdisjoint(walk.called_names):
            self._values += _variables(environment)
        self._saved = [(name, holder, dict(items_of(holder))) for name, holder in walk.holders.values()]
        self._names = {id(holder): name for name, holder in walk.holders.values()}
        self._dictionaries = [entry for entry in self._saved if isinstance(entry[1], dict)]
        self._words = Words([holder for _, holder, _ in self._dictionaries])
        found = [value for _, _, value, _ in self._watched]
        self.tensors = [value for value in found if isinstance(value, torch.Tensor) and has_memory(value)]
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
        """Which modules are in training mode. What `torch.jit.freeze` made has none."""
        try:
            return list(map(_training, self.modules))
        except AttributeError:
            return [bool(getattr(module, "training", False)) for module in self.modules]

    def changed_values(self) -> list[str]:
        """The names of other Python values that are others now."""
        now = numerics()
        return [name for name, value in self._numerics.items() if now[name] != value] + self._changed_values()

    def _changed_values(self) -> list[str]:
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

    # -- before every replay, all at once ----------------------------------------------------------

    def standing(self, without: Collection[int] = (), *, of_wrapper: bool = False) -> Callable[[], bool]:
        """A function that tells, in a few ten microseconds, whether all that Python code may look at is as
        it is now: values, tensors by identity and address, modules with their kinds, hooks and modes.
        `without`: dictionaries, by identity, that somebody else looks after. `of_wrapper`: the geometry of
        tensors counts as well, and those that an object keeps as its results."""
        found = Comparison()
        for h, key, value, _ in self._values:
            if isinstance(h, ARRAYS):
                found.add_equal(functools.partial(item_of, h, key))
            elif isinstance(h, dict) and value is None and key not in h:
                found.add_missing(h, key)
            elif not self._is_kept(h, key, value):
                now = item_of(h, key)  # an equal one may have taken its place
                found.add_places([(h, key, now if same_constant(now, value) else value)])
        used = self._watched if of_wrapper else self._used(without)
        found.add_places((holder, key, value) for holder, key, value, _ in used)
        tensors = [value for _, _, value, _ in used if isinstance(value, torch.Tensor) and has_memory(value)]
        if of_wrapper:
            found.add_tensors(tensors)
        elif tensors:
            found.add_equal(lambda: list(map(_address, tensors)))
        for table in (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks):
            _add_hooks(found, table)
        found.add_equal(_numbers)
        found.add_types([*self.modules, *self._objects])
        for each in self._objects:
            found.add_attributes(each)
        for module in self.modules:
            _add_module(found, module)
        counted = [*self._tables, *(attributes for _, _, attributes, _ in self._attributes), *self._growing]
        for each in counted:
            found.add_size(each)
        return found.compiled()

    def added(self) -> list[str]:
        """The names of what was not there, see Note [What was added]."""
        then = {id(holder): (name, saved) for name, holder, saved in self._saved}
        found = []
        for holder in (*self._tables, *(each for each in self._growing if id(each) not in self._not_growing)):
            name, saved = then[id(holder)]
            found += [f"{name}{key}" for key in dict(items_of(holder)).keys() - saved.keys()]
        for who, name, attributes, before in self._attributes:
            new = [key for key in attributes.keys() - before if (who, key) not in self._ignored]
            found += [f"{name}{key}" for key in new if key in self._called_names or is_called_by_python(key)]
        return sorted(found)

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
        """Whether it is a result, or the place for one, that an object keeps and no code mentions; a number,
        too, in an object whose own method is what is called: a trainer's."""
        of_bound = id(holder) in self._of_bound and self._called_names.isdisjoint(BY_ANY_NAME)
        is_result = value is None or isinstance(value, torch.Tensor) or of_bound
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
            changed.append("a module to which layers were added")
        raise moved_error(changed or ["something that the step reads"])

    # -- around trial runs -------------------------------------------------------------------------

    def _touched(self) -> Iterator[tuple[str, Any, dict[Any, Any]]]:
        """What was saved, without dictionaries that nobody has changed."""
        yield from (entry for entry in self._saved if not isinstance(entry[1], dict))
        yield from (self._dictionaries[number] for number in self._words.changed())

    def changed(self) -> set[Key]:
        """Where something else stands now, or nothing any more, or something that did not."""
        found = set()
        for _, holder, saved in self._touched():
            now = dict(items_of(holder))
            for key in {**saved, **now}:
                if _is_other(now.get(key, MISSING), saved.get(key, MISSING)):
                    found.add((identity(holder), key))
        return found

    def differing(self) -> Iterator[Change]:
        """Where something else stands now, or nothing any more; a list is one place."""
        seen = set()
        for name, holder, saved in self._touched():
            if isinstance(holder, list | deque):
                was, entries = list(saved.values()), list(holder)
                if len(was) != len(entries) or not all(map(is_, was, entries)):
                    yield Change(name.rstrip(". "), holder, WHOLE, was, entries)
                continue
            now = dict(items_of(holder))
            for key in {**saved, **now}:
                found = Change("", holder, key, saved.get(key, MISSING), now.get(key, MISSING))
                if _is_other(found.now, found.was) and found.place not in seen:
                    seen.add(found.place)
                    yield found._replace(name=self._shown(name, holder, key))

    def carried(self, ran: Collection[CodeType] | None = None) -> list[str]:
        """The names of numbers and settings that are others now and that code looks at: what a run changes
        and the next one may follow. `ran`: the code that counts; None: all that was found."""
        codes = self._codes if ran is None else [code for code in ran if is_read_from(code)]
        changed = [
            change
            for change in self.differing()
            if change.is_state and not same_constant(change.now, change.was)
        ]
        return list(dict.fromkeys(each.name for each in changed if self.is_looked_at(each, codes)))

    def effects(
        self, ran: Collection[CodeType] | None, reads: Collection[int], besides: Collection[Key] = ()
    ) -> tuple[Effects, str | None]:
        """What the run since then leaves that a replay is to leave, and the place of state that it keeps by
        assignment, if any. `ran`: the code that ran; `reads`: addresses of the storages that it used;
        `besides`: places that are not to be looked at."""
        codes = self._codes_of(ran)
        found = Effects(lambda name: line_using(name, codes))
        names = frozenset[str]().union(*map(named_in, codes))
        for change in self.differing():
            if change.place in besides:
                continue
            name, is_everything = self._mention(change)[0], not _BY_MADE_UP_NAMES.isdisjoint(names)
            if change.carries_on(reads):
                return found, change.name
            if name in names or is_everything or (change.now is not MISSING and tensors_in(change.now)):
                if change.key is WHOLE and change.former and self.is_looked_at(change, codes):
                    return found, change.name
                way, is_inside = self._ways.get(id(change.holder)), self._is_container(change.holder)
                found.add(change, way)
                if way is not None and is_inside and not self.is_looked_at(change, codes):
                    found.owners.add((identity(way.holder), way.key))  # whoever reads it may replace it
        return found, None

    def add_assigned_once(self, effects: Effects, ran: Collection[CodeType] | None) -> None:
        """Add numbers and settings that are others since then and that nobody in the step looks at: a run
        may have assigned what stood there already, and may assign something else for another batch."""
        codes = self._codes_of(ran)
        for change in self.differing():
            is_known = change.place in effects.owners or change.key is WHOLE
            if is_known or change.now is MISSING or not change.is_state or self._is_container(change.holder):
                continue
            is_own = any(self._mention(change)[0] in named_in(code) for code in codes)
            if is_own and not self.is_looked_at(change, codes):
                effects.add_constant(change, self._ways.get(id(change.holder)))

    def accumulates(self, ran: Collection[CodeType] | None) -> Callable[[str], bool]:
        """Tells of a name whether code that ran adds something to what has it."""
        codes = self._codes_of(ran)
        return lambda name: any(accumulates(code, _last_name(name)) for code in codes)

    def left_elsewhere(
        self, ran: Collection[CodeType] | None, effects: Effects, besides: Collection[Key] = ()
    ) -> str | None:
        """The name of another place in which something else stands that nobody in the step looks at: what it
        does look at may be made once for every size. `besides`: places that are not to be looked at."""
        codes = self._codes_of(ran)
        for change in self.differing():
            has_tensors = change.now is not MISSING and bool(tensors_in(change.now))
            is_new = change.was is MISSING or same_constant(change.now, change.was)
            is_known = change.place in effects.owners or change.place in besides
            if is_known or (is_new and not has_tensors):
                continue
            if (has_tensors and effects) or (
                (has_tensors or change.is_state)
                and any(self._mention(change)[0] in named_in(code) for code in codes)
                and not self.is_looked_at(change, codes)
            ):
                return change.name
        return None

    def _codes_of(self, ran: Collection[CodeType] | None) -> list[CodeType]:
        return [code for code in (self._codes if ran is None else ran) if is_read_from(code)]

    def is_looked_at(self, change: Change, codes: Collection[CodeType]) -> bool:
        """Returns whether some of this code looks at what has changed."""
        name, kinds = self._mention(change)
        return not isinstance(name, str) or any(looks_at(code, name, **kinds) for code in codes)

    def _mention(self, change: Change) -> tuple[Any, dict[str, bool]]:
        """How code mentions a place: the name of an attribute or variable."""
        holder, key, is_inside = change.holder, change.key, False
        while id(holder) in self._ways and self._is_container(holder):
            holder, key, is_inside = *self._ways[id(holder)][:2], True
        if isinstance(holder, CellType):
            return self._names[id(holder)].strip(), {"attribute": False, "variable": True}
        if self._is_container(holder):
            return _last_name(change.name), {"attribute": True, "variable": True}
        is_variable = isinstance(holder, PartOf) or is_inside
        return key, {"attribute": not isinstance(holder, PartOf), "variable": is_variable}

    def _is_container(self, holder: Any) -> bool:
        is_named = isinstance(holder, dict | type | PartOf | CellType) or hasattr(holder, "__slots__")
        return not is_named or id(holder) in self._containers

    def _shown(self, prefix: str, holder: Any, key: Any) -> str:
        is_attribute = isinstance(holder, dict | type | PartOf) or hasattr(holder, "__slots__")
        return f"{prefix}{key}" if is_attribute else prefix.rstrip(". ")

    def why_closed(self) -> str | None:
        """Why no graph can do what uses something that nobody can compare or undo, if the code does."""
        if not self.closed:
            return None
        name, why = self.closed[0]
        line = line_using(name, [code for code in self._codes if code.co_name != "__init__"])
        place = f" (at {line})" if line else ""
        return f"the step uses {name or 'something'}, which {why}: use it outside of the step{place}"

    def put_back(self, keys: Collection[Key], *, but_new: bool = False) -> None:
        """Undo assignments at these places, and at no others: somebody else may have made those. `but_new`:
        what stands where nothing did stays."""
        for _, holder, saved in self._touched():
            if isinstance(holder, list | deque):
                if any(owner == id(holder) for owner, _ in keys):
                    holder.clear()
                    holder.extend(saved.values())
                continue
            for key, now in items_of(holder):
                if (identity(holder), key) in keys and key not in saved:
                    if not but_new:
                        drop(holder, key)
                elif (identity(holder), key) in keys and _is_other(now, saved[key]):
                    put(holder, key, saved[key])
            for key in saved.keys() - dict(items_of(holder)).keys():
                if (identity(holder), key) in keys:
                    put(holder, key, saved[key])

    # -- internals ---------------------------------------------------------------------------------

    def _code_now(self) -> list[Any]:
        tables = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
        found: list[Any] = list(chain.from_iterable(table.values() for table in tables))
        for each in self._objects:
            found += type(each), vars(each)
        for module in self.modules:
            own = vars(module)
            found += (type(module), own.get("forward"))
            for hooks in HOOKS:
                found += own.get(hooks, {}).values()
        return found


def _variables(names: Collection[Any] | None) -> list[tuple[Any, Any, Any, str]]:
    """Environment variables of these names, or all as one."""
    holder = environment_now()
    if names is None:
        return [(holder, WHOLE, item_of(holder, WHOLE), "os.environ")]
    return [(holder, key, holder.get(key), f"os.environ[{os.fsdecode(key)!r}]") for key in sorted(names)]


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


def _add_module(found: Comparison, module: torch.nn.Module) -> None:
    """Its mode, its hooks, and whether it has a `forward` of its own."""
    own = vars(module)
    if "training" in own:
        found.add_places([(own, "training", own["training"])])
    else:  # TorchScript
        found.add_equal(lambda: getattr(module, "training", False))
    for hooks in HOOKS:
        if hooks in own:
            found.add_places([(own, hooks, own[hooks])])
            _add_hooks(found, own[hooks])
    if "forward" in own:
        found.add_places([(own, "forward", own["forward"])])
    else:
        found.add_missing(own, "forward")


def _add_hooks(found: Comparison, hooks: dict[Any, Any]) -> None:
    """The same ones, in the same order."""
    if hooks:
        found.add_equal(lambda: list(hooks.values()))
    else:
        found.add_empty(hooks)


def _numbers() -> tuple[Any, ...]:
    """Settings by which the same operations give other numbers: asked at every call, so without a loop."""
    return _dtype_now(), _precision_now(), _deterministic_now(), _flash(), _efficient(), _math(), _cudnn()


def numerics() -> dict[str, Any]:
    """Settings of torch's by which the same operations give other numbers."""
    dtype, precision, deterministic, *attention = _numbers()
    return {
        "the default dtype": dtype,
        "the precision of float32 products": precision,
        "deterministic algorithms": deterministic,
        "kinds of attention": tuple(attention),
    }


def _is_other(now: Any, was: Any) -> bool:
    """Whether something else stands there: contents of arrays are made anew whenever they are asked for."""
    return now is not was and not (isinstance(now, bytes) and isinstance(was, bytes) and now == was)


def _last_name(prefix: str) -> str:
    """Of the attribute or variable by which a container is reached."""
    return (
        re.split(r"[.\[]", prefix.rstrip(". "))[-1]
        if "[" not in prefix
        else prefix.split("[")[0].split(".")[-1]
    )


def _geometry_of(tensors: list[torch.Tensor]) -> tuple[list[Any], ...]:
    return tuple(list(map(question, tensors)) for question in (_address, _size, _stride, _dtype))


def _all_items(holder: Any, keys: list[Any]) -> list[Any]:
    return [item_of(holder, key) for key in keys]
