"""What `graphed` returns: objects that behave like what they wrap.

Note [The wrapper of a module]
It is an object of a subclass of the module's own class and shares its `__dict__`. So every method of that
class, overridden or not, works on the parameters, buffers, submodules and attributes of the module itself,
and `isinstance` holds. Only calls are handled differently. The module itself is not changed.

Neither the class nor its object is made by code of the wrapped class: not by its `__new__`, which may want
arguments or make another class (torch.fx), nor by its metaclass, which may keep a list of all classes.
Attributes in slots are the module's own.
"""

import abc
import copy
import functools
import logging
import types
from collections.abc import Callable
from typing import Any

import torch

from ..capturing.pool import GraphPool
from ..checking.verify import Verification
from ..errors import ConfigError
from ..report import Report
from ..trimming import same_constant
from .doctor import Diagnosis
from .entry import Settings
from .graphed_call import GraphedCall
from .holders import slot_names

logger = logging.getLogger("ostinato.graphs")


class _GraphControls:
    """The methods that a wrapper adds to what it wraps."""

    __slots__ = ()
    graph_call: GraphedCall

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.graph_call.serve(args, kwargs)

    def unwrap(self) -> Any:
        """The wrapped function or module."""
        return self.graph_call.function

    def capture(self, *args: Any, **kwargs: Any) -> Report:
        """Capture every rung for calls like this one, ahead of the first call."""
        return self.graph_call.capture(*args, **kwargs)

    def doctor(self, *args: Any, **kwargs: Any) -> Diagnosis:
        """Say what keeps calls like this one from graphs: every line and cause. Leaves nothing behind."""
        return self.graph_call.doctor(*args, **kwargs)

    def recapture(self) -> Report:
        """Capture again in the present state: moved weights, train() or eval(), autocast."""
        return self.graph_call.recapture()

    def report(self) -> Report:
        """What was captured, what it served, and why calls ran eagerly."""
        return self.graph_call.report()

    def verify(self, *, tolerance: float | None = None, seed: int = 0) -> Verification:
        """Compare every graph with the eager function. Raises VerifyError if they disagree."""
        return self.graph_call.verify(tolerance=tolerance, seed=seed)

    def check_addresses(self) -> None:
        """Raise AddressError if something that graphs read has moved or was replaced since the capture."""
        self.graph_call.check_addresses()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A copy has the same settings and captures its own graphs: these read the original's memory."""
        return wrap, (self.graph_call.function, self.graph_call.settings)

    def __copy__(self) -> Any:
        return wrap(copy.copy(self.graph_call.function), self.graph_call.settings)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Not by the wrapped class's own method, which would fill an object of the wrapper's class."""
        return wrap(copy.deepcopy(self.graph_call.function, memo), self.graph_call.settings)


class GraphedFunction(_GraphControls):
    """A function served from graphs. A decorated method has one wrapper per object."""

    def __init__(self, call: GraphedCall) -> None:
        self.graph_call = call
        self.name, self._place = getattr(call.function, "__name__", "?"), f"_graphed_{id(self)}"
        """Where it is found in a class, and where an object keeps its own."""
        functools.update_wrapper(self, call.function, updated=())

    def __set_name__(self, owner: Any, name: str) -> None:
        self.name, self._place = name, f"_graphed_{owner.__name__}_{name}"

    def __get__(self, instance: Any, owner: Any = None) -> "GraphedFunction":
        if instance is None:
            return self
        place = self._place
        found = getattr(instance, "__dict__", {}).get(place)
        if isinstance(found, _GraphedMethod) and found.is_of(instance, self):
            return found
        method = _GraphedMethod(instance, self)
        if isinstance(instance, type):  # a class method's
            type.__setattr__(instance, place, method)
        elif hasattr(instance, "__dict__"):
            vars(instance)[place] = method
        else:
            raise TypeError(f"{type(instance).__name__} has no __dict__: wrap the bound method of an object")
        return method

    def __getattr__(self, name: str) -> Any:
        if name == "graph_call":
            raise AttributeError(name)
        return getattr(self.graph_call.function, name)


class _GraphedMethod(GraphedFunction):
    """A decorated method of one object."""

    def __init__(self, instance: Any, decorated: GraphedFunction) -> None:
        call = decorated.graph_call
        super().__init__(
            GraphedCall(types.MethodType(call.function, instance), call.settings, call.given_pool)
        )
        self._instance, self._decorated = instance, decorated

    def is_of(self, instance: Any, decorated: GraphedFunction) -> bool:
        """Whether it belongs to this object: a shallow copy of an object has the wrappers of the original."""
        return self._decorated is decorated and self._instance is instance

    def __get__(self, instance: Any, owner: Any = None) -> "GraphedFunction":
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A copy is that of the object's copy."""
        return getattr, (self._instance, self._decorated.name)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return getattr(copy.deepcopy(self._instance, memo), self._decorated.name)


class GraphedModule(_GraphControls):
    """A module served from graphs; see Note [The wrapper of a module]."""

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Do not run the wrapped class's hook for subclasses."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":  # as parametrizations do: the module itself would be left without its weight
            for table, key, deleted in self.graph_call.just_deleted:
                table[key] = deleted
            raise TypeError("the class of a wrapper cannot be changed: change that of the module in unwrap()")
        before = vars(self).get(name, _NOTHING)
        super().__setattr__(name, value)
        self._attribute_set(name, before, value)

    def __delattr__(self, name: str) -> None:
        before = vars(self).get(name, _NOTHING)
        tables = [table for table in (vars(self)["_parameters"], vars(self)["_buffers"]) if name in table]
        self.graph_call.just_deleted = [(table, name, table[name]) for table in tables]
        super().__delattr__(name)
        self._attribute_set(name, before, _NOTHING)

    def _attribute_set(self, name: str, before: Any, value: Any) -> None:
        # Tensors and modules are compared at every call; training mode is, too.
        is_compared = name == "training" or isinstance(value, torch.Tensor | torch.nn.Module)
        if not is_compared and not same_constant(before, value):
            self.graph_call.attributes_changed = True

    def __repr__(self) -> str:
        return f"graphed({self.graph_call.function!r})"


_NOTHING = object()
_CONTROLS = [name for name in vars(_GraphControls) if not name.startswith("_") and name != "graph_call"]


def wrap(function: Callable[..., Any], settings: Settings, pool: GraphPool | None = None) -> Any:
    """Make a wrapper, which has no graphs yet."""
    call = GraphedCall(function, settings, pool)
    taken = [
        name for name in _CONTROLS if hasattr(function, name) and not isinstance(function, _GraphControls)
    ]
    if taken and isinstance(function, torch.nn.Module):
        logger.warning(
            "the wrapper's own methods hide %s of the module: use unwrap() to reach it", ", ".join(taken)
        )
    if not isinstance(function, torch.nn.Module):
        return GraphedFunction(call)
    wrapped: Any = type(function)
    kind = _wrapper_class(wrapped)
    try:
        wrapper = object.__new__(kind)
    except TypeError as error:
        raise ConfigError(
            f"graphed() cannot wrap a {wrapped.__name__}, a module that is also a dict, list or the like and "
            f"has contents outside of its attributes: wrap graphed(module.forward), or a function that "
            f"calls it"
        ) from error
    object.__setattr__(wrapper, "__dict__", vars(function))
    object.__setattr__(wrapper, "graph_call", call)
    return wrapper


@functools.cache
def _wrapper_class(wrapped: type) -> Any:
    bases = (wrapped,) if issubclass(wrapped, GraphedModule) else (GraphedModule, wrapped)
    place = {
        "__module__": wrapped.__module__,
        "__qualname__": wrapped.__qualname__,
        "__doc__": wrapped.__doc__,
        "__slots__": ("graph_call",),
        **{name: _slot_of_the_module(name) for name in slot_names(wrapped) if name != "graph_call"},
    }
    metaclass = type(wrapped)
    builder = abc.ABCMeta if issubclass(metaclass, abc.ABCMeta) else type
    return builder.__new__(metaclass, wrapped.__name__, bases, place)


def _slot_of_the_module(name: str) -> property:
    return property(
        lambda self: getattr(self.graph_call.function, name),
        lambda self, value: setattr(self.graph_call.function, name, value),
        lambda self: delattr(self.graph_call.function, name),
    )
