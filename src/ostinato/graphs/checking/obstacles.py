"""What in a step a capture would forbid: all of it, from one run that a recording would break off at once."""

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from ..blame import Blame, frame_line, frames_now, is_users
from ..capture_queries import answering_capture_queries
from ..capturing.segments import eager_calls_by
from ..dispatch_mode import WatchingMode
from ..forbidden import (
    WATCHED_FUNCTIONS,
    Forbidden,
    forbidden_function,
    forbidden_op,
    one_hot_unchecked,
)
from ..known_calls import explained
from ..memory import is_foreign, is_plain, tensors_of
from ..replaced import replaced

_WAIT = "makes the CPU wait for the device: leave it out, or wait after the replay"
_QUERY = "asks how far the device is, which no capture answers: ask after the replay"
_OF_STREAMS: tuple[tuple[Any, str, str], ...] = (
    (torch.cuda, "synchronize", _WAIT),
    (torch.accelerator, "synchronize", _WAIT),
    (torch.cuda.Stream, "synchronize", _WAIT),
    (torch.cuda.Event, "synchronize", _WAIT),
    (torch.cuda.Stream, "query", _QUERY),
    (torch.cuda.Event, "query", _QUERY),
    (torch.cuda.Event, "elapsed_time", _QUERY),
)


_FACTORIES = {
    *(torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand),
    *(torch.randint, torch.randn, torch.randperm, torch.zeros),
}


@dataclass(frozen=True)
class Obstacle:
    """A line that cannot be captured, and one thing that it does."""

    where: str | None
    """The user's line, as ``file:line in function: source``; None if no code of the user's was running."""
    what: str
    """The call that cannot be captured."""
    why: str
    """What that call does, and what to write instead; continues a sentence that begins with "it"."""
    times: int
    """How often that happened in one run of the step."""
    inside: str | None = None
    """The line of a library, called from the user's, that did it."""
    is_refused: bool = True
    """Whether a capture refuses it. If not, a replay would repeat, without a word, what the capture saw."""

    def __str__(self) -> str:
        often = f" ({self.times} times)" if self.times > 1 else ""
        inside = f"\n    inside {self.inside}" if self.inside else ""
        return f"{self.where or 'not in code of yours'}{inside}\n    {self.what}{often}: {self.why}"


class _Memory:
    """What a step has used and made so far. Weak references keep addresses from being used again."""

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}
        self._made: set[int] = set()

    def is_known(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._known

    def is_inside(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._made

    def note(self, given: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        self._add(given)
        self._made |= self._add(results)

    def _add(self, tensors: list[torch.Tensor]) -> set[int]:
        """Returns which of them are new."""
        storages = {s._cdata: s for tensor in tensors if is_plain(tensor) for s in [tensor.untyped_storage()]}
        new = storages.keys() - self._known.keys()
        self._known |= {key: StorageWeakRef(storages[key]) for key in new}
        return set(new)


class ObstacleWatch:
    """Lists what a capture would forbid of the code in its context, which runs as usual.

    `with ObstacleWatch() as watch: loss(model(x)).backward()`, then `print(watch)`. Code that asks whether it
    is being captured is told that it is.
    """

    def __init__(self, *, piecewise: bool = False) -> None:
        """`piecewise`: functions marked `@eager_boundary` may do anything."""
        self.operations = 0
        """ATen calls seen."""
        self.made_on_host: dict[str, str] = {}
        """Lines of the user's that make a tensor without a device, and with what function."""
        self._piecewise = piecewise
        self._times: dict[tuple[Blame, Forbidden, bool], int] = {}
        self._passing = 0
        self._open = ExitStack()

    @property
    def obstacles(self) -> tuple[Obstacle, ...]:
        """What was found, in the order in which it was met."""
        found = self._times.items()
        return tuple(
            Obstacle(blame.line, call.what, call.why, times, blame.inside, is_refused)
            for (blame, call, is_refused), times in found
        )

    def __str__(self) -> str:
        operations = counted(self.operations, "operation")
        found = [f"{counted(len(self.obstacles), 'obstacle')} in {operations}"]
        return "\n".join([*found, *map(str, self.obstacles)])

    def note(self, found: Forbidden | None, blame: Blame | None = None, *, is_refused: bool = True) -> None:
        """Add to the list, unless this is inside something that is on it, or need not be."""
        if found is None or self._passing:
            return
        if blame is None:
            found, blame = explained(found, frames_now())
        key = blame, found, is_refused
        self._times[key] = self._times.get(key, 0) + 1

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A context in which nothing counts."""
        self._passing += 1
        try:
            yield
        finally:
            self._passing -= 1

    def __enter__(self) -> "ObstacleWatch":
        # Code that asks whether it is being captured, to print only if not, must hear that it is.
        self._open.enter_context(answering_capture_queries(lambda: not self._passing))
        self._open.enter_context(_noting_waits(self))
        if self._piecewise:
            self._open.enter_context(eager_calls_by(_Boundaries(self)))
        self._open.enter_context(_Operations(self))
        self._open.enter_context(_Functions(self))
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()


class _Operations(WatchingMode):
    """Sees ATen calls."""

    def __init__(self, watch: ObstacleWatch) -> None:
        super().__init__()
        self._watch = watch
        self._memory = _Memory()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        if any(map(is_foreign, given)):
            return NotImplemented
        self._watch.operations += 1
        if all(map(is_plain, given)):
            self._watch.note(forbidden_op(func, args, kwargs, self._memory))
        result = func(*args, **kwargs)
        self._memory.note(given, tensors_of(result))
        return result

    def pass_unseen(self, why_not_captured: str) -> None:
        why, _, _ = why_not_captured.partition(" (at ")
        self._watch.note(Forbidden("an operator over functions", why))


class _Functions(TorchFunctionMode):
    """Sees host reads that make no ATen call."""

    def __init__(self, watch: ObstacleWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES:
            self._note_maker(func, kwargs)
        if func not in WATCHED_FUNCTIONS:
            return func(*args, **kwargs)
        found = forbidden_function(func, args, kwargs)
        if found is None:
            unchecked = one_hot_unchecked(func, args, kwargs)
            return func(*args, **kwargs) if unchecked is None else unchecked
        self._watch.note(found)
        with self._watch.passing():
            return func(*args, **kwargs)

    def _note_maker(self, func: Any, kwargs: dict[str, Any]) -> None:
        caller = sys._getframe(2)
        has_device = kwargs.get("device") is not None or torch.get_default_device().type != "cpu"
        if not has_device and is_users(caller):
            self._watch.made_on_host[frame_line(caller, caller.f_lineno)] = f"torch.{func.__name__}"


class _Boundaries:
    """What happens at functions marked `@eager_boundary` when the capture will be piecewise."""

    breaks = True

    def __init__(self, watch: ObstacleWatch) -> None:
        self._watch = watch

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._watch.passing():
            return function(*args, **kwargs)


@contextmanager
def _noting_waits(watch: ObstacleWatch) -> Iterator[None]:
    """Note when this thread waits for a device, a stream or an event, or asks for its progress."""
    thread = threading.get_ident()

    def noting(owner: Any, name: str, why: str) -> Any:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(*args, **kwargs)
            watch.note(Forbidden(f"{owner.__name__}.{name}", why))
            with watch.passing():
                return original(*args, **kwargs)

        return call

    with ExitStack() as all_replaced:
        for owner, name, why in _OF_STREAMS:
            all_replaced.enter_context(replaced(owner, name, noting(owner, name, why)))
        yield


def counted(number: int, what: str) -> str:
    """A number of things, in words for people."""
    return f"{number} {what}{'s' * (number != 1)}"
