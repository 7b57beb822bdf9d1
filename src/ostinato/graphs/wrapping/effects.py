"""What a step leaves in Python besides its results, and how a replay leaves the same.

Note [What replays leave]
A replay runs no Python. What every run of a step was seen to leave there, a replay leaves instead: tensors
are results of another kind, handed out and put where the step would have put them, or appended to the list
that it appends them to; a number that every run raises by the same amount is raised. Apart from its tensors,
what a run leaves must be the same in every run, whatever the size of the batch. Anything else gets no graph.
One thing may differ between two runs on the same inputs, and is left alone: a number taken from elsewhere,
such as the time that a call took.

Note [Where it is now]
Whoever reads what a step leaves may put another list or dictionary in place of the one that the step fills
(`model.losses = []`). So a container is looked up by the way that led to it.
"""

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from math import isclose
from operator import is_
from typing import Any, NamedTuple

import torch

from ..capturing.gate import is_recording
from ..errors import AddressError, CaptureError
from ..memory import storage_address
from ..trees import Structure, flatten, map_tensors, tensors_in
from ..trimming import same_constant
from .holders import ARRAYS, GENERATORS, MISSING, WHOLE, Key, identity, item_of, put

_STATE = (bool, int, float, complex, str, bytes, type(None))
_STATES = (*_STATE, tuple, list, dict, set, torch.dtype, torch.device)
_INSTEAD = "leave tensors there, return it, or do it outside of the step"
_ROUNDING = 1e-9
"""By which the same amount may differ when it is added to other numbers."""


class Stepped(NamedTuple):
    """What a step returns that leaves something in Python."""

    result: Any
    left: list[Any]


class Change(NamedTuple):
    """A place where something else stands than before a run. All entries of a list are one place."""

    name: str
    holder: Any
    key: Any
    was: Any
    now: Any

    @property
    def place(self) -> Key:
        """The place by identity."""
        return identity(self.holder), self.key

    @property
    def former(self) -> list[torch.Tensor]:
        """The tensors that stood there."""
        return [] if self.was is MISSING else tensors_in(self.was)

    @property
    def is_state(self) -> bool:
        """Returns whether it is a number, a setting or contents, no tensor and no object of a class."""
        found = [each for each in (self.now, self.was) if each is not MISSING]
        return all(isinstance(each, _STATES) and not tensors_in(each) for each in found)

    def is_still(self, later: "Change") -> bool:
        """Returns whether the same stands there later."""
        if self.key is WHOLE:
            return len(self.now) == len(later.now) and all(map(is_, self.now, later.now))
        return self.now is later.now

    def carries_on(self, reads: Collection[int]) -> bool:
        """Returns whether the step keeps state there by assignment, which no replay would carry on: what
        stood there was used (its storage is among `reads`), or is a parameter or buffer."""
        is_registered = isinstance(self.was, torch.nn.Parameter | torch.nn.Buffer)
        return is_registered or any(storage_address(tensor) in reads for tensor in self.former)


class Way(NamedTuple):
    """How a container was reached, see Note [Where it is now]."""

    holder: Any
    key: Any
    inside: Callable[[Any], Any]
    """Gives the container that is in what stands there."""
    before: "Way | None"

    def end(self, like: Any) -> Any:
        """The container that is there now; an empty one like this is made where there is none."""
        holder = self.holder if self.before is None else self.before.end(self.holder)
        found = item_of(holder, self.key)
        if found is None and not (isinstance(holder, dict) and self.key in holder):
            found = copy.copy(like)
            found.clear()
            put(holder, self.key, found)
        inside = None if found is None else self.inside(found)
        if type(inside) is not type(like):
            raise AddressError(
                f"{self.key} is a {type(found).__name__} now, and the step fills a {type(like).__name__}: "
                f"put one there, or capture again"
            )
        return inside

    def end_now(self, like: Any) -> Any:
        """The container that is there now, or the one like it."""
        holder = self.holder if self.before is None else self.before.end_now(self.holder)
        found = item_of(holder, self.key)
        inside = None if found is None else self.inside(found)
        return inside if type(inside) is type(like) else like


class _Place:
    """Something is put there in every run."""

    def __init__(self, change: Change, way: Way | None) -> None:
        self.name, self._key, self._holder, self._way = change.name, change.key, change.holder, way

    @property
    def key(self) -> Key:
        """The place by identity."""
        return identity(self._holder), self._key

    @property
    def holder(self) -> Any:
        """The dictionary, list or object, as the step would find it now."""
        return self._holder if self._way is None else self._way.end(self._holder)

    @property
    def now(self) -> Key:
        """The place by identity, as it is now."""
        return identity(self._holder if self._way is None else self._way.end_now(self._holder)), self._key

    def begin(self) -> None:
        """Call before a run."""

    def left(self) -> Any:
        """What the run has left."""
        return item_of(self.holder, self._key)

    def standing(self) -> Any:
        """What some run has left, whenever that began."""
        return self.left()

    def leave(self, value: Any) -> None:
        """Leave this, as a run would."""
        put(self.holder, self._key, value)

    def exchange(self, value: Any) -> None:
        """Leave this in place of what a run has left."""
        self.leave(value)


class _Counted(_Place):
    """A number is raised there."""

    def __init__(self, place: _Place) -> None:
        self.__dict__.update(vars(place))

    def begin(self) -> None:
        self._was = self._now()

    def left(self) -> Any:
        return self._now() - self._was

    def standing(self) -> Any:
        return 0

    def leave(self, value: Any) -> None:
        put(self.holder, self._key, self._now() + value)

    def exchange(self, value: Any) -> None:
        """Nothing is to be exchanged: it is a number."""

    def _now(self) -> Any:
        holder = self.holder
        if not isinstance(holder, dict):
            return item_of(holder, self._key)
        return holder[self._key] if self._key in holder or hasattr(type(holder), "__missing__") else 0


class _Appended(_Place):
    """Something is appended to a list."""

    def __init__(self, change: Change, way: Way | None, number: int) -> None:
        super().__init__(change, way)
        self._number, self._length = number, 0

    def begin(self) -> None:
        self._length = len(self.holder)

    def left(self) -> Any:
        entries = list(self.holder)
        is_full = getattr(self.holder, "maxlen", None) == len(entries)
        number = self._number if is_full else max(0, len(entries) - self._length)
        return tuple(entries[len(entries) - number :])

    def standing(self) -> Any:
        return tuple(self.holder)[-self._number :]

    def leave(self, value: Any) -> None:
        self.holder.extend(value)

    def exchange(self, value: Any) -> None:
        holder = self.holder
        for at, entry in enumerate(value, len(holder) - len(value)):
            holder[at] = entry


class _Refilled(_Place):
    """A list gets other entries, as many as it had."""

    def left(self) -> Any:
        return tuple(self.holder)

    def leave(self, value: Any) -> None:
        self.holder[:] = value


class Effects:
    """What every run of a step leaves, see Note [What replays leave]."""

    def __init__(self, line_of: Callable[[str], str | None] = lambda name: None) -> None:
        """`line_of`: the line that assigns what has this name, if it is known."""
        self._line_of = line_of
        self.refusal: str | None = None
        """Why no replay can leave that."""
        self.varies: str | None = None
        """Why not, as later runs have shown."""
        self.measured: list[str] = []
        """Numbers that replays leave alone, by name."""
        self.alone: set[Key] = set()
        """Where these are."""
        self.owners: set[Key] = set()
        """All places, these included."""
        self._places: list[_Place] = []
        self._numbers: dict[int, Any] = {}
        """What was added in the first run, by position."""
        self._kinds: list[tuple[Structure, list[Any]]] = []
        """What runs leave in each place, apart from tensors."""

    def __bool__(self) -> bool:
        return bool(self._places)

    @property
    def names(self) -> list[str]:
        """The names of the places."""
        return [place.name for place in self._places]

    @property
    def only_assigns(self) -> bool:
        """Returns whether leaving everything twice is the same as once."""
        return not any(isinstance(place, _Counted | _Appended) for place in self._places)

    def places(self) -> set[Key]:
        """Where they are, and where they were when they were found."""
        return self.owners | {place.now for place in self._places}

    def storages(self) -> set[int]:
        """Where the tensors that stand in all these places now have their memory."""
        return {storage_address(tensor) for place in self._places for tensor in tensors_in(place.standing())}

    def refuse(self, name: str, does: str, instead: str = "do that outside of the step") -> None:
        """There is no graph for what the step does with what has this name."""
        self.refusal = self.refusal or self._told(name, does, instead)

    def _told(self, name: str, does: str, instead: str) -> str:
        line = self._line_of(name)
        place = f" (at {line})" if line else ""
        return f"the step {does}, which a replay would not do: {instead}{place}"

    # -- from two runs on the same inputs ----------------------------------------------------------

    def add(self, change: Change, way: Way | None = None) -> None:
        """Add what a run has changed."""
        name, holder, key, was, now = change
        self.owners.add(change.place)
        if now is MISSING:
            self._refuse_removal(name)
        elif isinstance(holder, (*ARRAYS, *GENERATORS)):
            self.refuse(
                name, f"changes the contents of {name}", "use a tensor, or fill it outside of the step"
            )
        elif key is WHOLE:
            self._add_list(change, way)
        else:
            if _is_number(was) and _is_number(now):
                self._numbers[len(self._places)] = now - was
            self._places.append(_Place(change, way))

    def leave_to_replays(self, places: Collection[Key], by_both: Collection[str]) -> None:
        """Functions that replays call change these places. `by_both`: names of others, which the rest of the
        step changes, too."""
        self.owners |= set(places)
        for name in by_both:
            self.refuse(
                name,
                f"changes {name} inside and outside of @eager_boundary",
                "change it in one of the two, or around the calls",
            )

    def _add_list(self, change: Change, way: Way | None) -> None:
        name, holder, _, was, now = change
        if _begins_with(now, was):
            self._places.append(_Appended(change, way, len(now) - len(was)))
        elif isinstance(holder, deque) and holder.maxlen == len(now) == len(was):
            new = next(n for n in range(1, len(now) + 1) if _begins_with(now, was[n:]))
            self._places.append(_Appended(change, way, new))
        elif len(was) != len(now) or isinstance(holder, deque):
            self._refuse_removal(name)
        elif not any(map(is_, was, now)):
            self._places.append(_Refilled(change, way))
        else:
            for at, (before, after) in enumerate(zip(was, now, strict=True)):
                if before is not after:
                    self.add(Change(f"{name}[{at}]", holder, at, before, after), way)

    def _refuse_removal(self, name: str) -> None:
        self.refuse(name, f"takes something out of {name}")

    @contextmanager
    def told_apart(self, accumulates: Callable[[str], bool]) -> Iterator[None]:
        """Around a second run on the same inputs: what it raises, and what differs. `accumulates`: tells of
        a name whether code changes what has it in place."""
        before = [place.standing() for place in self._places]
        for place in self._places:
            place.begin()
        yield
        places, self._places, numbers = self._places, [], self._numbers
        for at, (place, then) in enumerate(zip(places, before, strict=True)):
            now = place.left()
            if _is_alike(_kind_of(then), _kind_of(now)):
                self._add_told(place, now)
            elif at in numbers and _is_number(now) and _is_close(now - then, numbers[at]):
                self._add_told(_Counted(place), numbers[at])
            elif _is_number(now) and type(place) is _Place and not accumulates(place.name):
                self.measured.append(place.name)
                self.alone.add(place.key)
            else:
                self.refuse(place.name, f"leaves something else in {place.name} in every run", _INSTEAD)

    def add_constant(self, change: Change, way: Way | None = None) -> None:
        """Add what a run has left that leaves the same in every run, as far as is known."""
        self.owners.add(change.place)
        self._add_told(_Place(change, way), change.now)

    def _add_told(self, place: _Place, left: Any) -> None:
        self._places.append(place)
        self._kinds.append(_kind_of(left))

    # -- in every later run ------------------------------------------------------------------------

    @contextmanager
    def noted(self) -> Iterator[list[Any]]:
        """Around a run: the list holds what it has left, in the order of the places. A recording raises
        CaptureError if that, or what some run before has left, was not always the same, apart from tensors.
        """
        left: list[Any] = []
        for place in self._places:
            place.begin()
        yield left
        left += [place.left() for place in self._places]
        for place, kind, known in zip(self._places, map(_kind_of, left), self._kinds, strict=True):
            if self.varies is None and not _is_alike(kind, known):
                self.varies = self._told(
                    place.name,
                    f"leaves something else in {place.name} for another batch ({_shown(known)} or "
                    f"{_shown(kind)})",
                    _INSTEAD,
                )
        if self.varies is not None and is_recording():
            raise CaptureError(self.varies)
        for at, (structure, leaves) in enumerate(self._kinds):
            if torch.Tensor not in leaves:
                left[at] = structure.filled(leaves)  # not with the rounding of this run

    # -- after every replay ------------------------------------------------------------------------

    def leave(self, values: Sequence[Any]) -> None:
        """Leave what a replay has made, as the run would have done."""
        for place, value in zip(self._places, values, strict=True):
            place.leave(value)

    def exchange(self, values: Sequence[Any]) -> None:
        """Behind a run that was made: leave these in place of what it has left."""
        for place, value in zip(self._places, values, strict=True):
            place.exchange(value)

    def let_go(self) -> None:
        """What stands there holds no history of autograd's any more, which would hold memory and streams."""
        self.exchange(map_tensors(torch.Tensor.detach, self.left_by_the_call()))

    def left_by_the_call(self) -> list[Any]:
        """What stands in the places behind a run that was not undone."""
        return [place.standing() for place in self._places]


def _kind_of(value: Any) -> tuple[Structure, list[Any]]:
    leaves, structure = flatten(value)
    return structure, [torch.Tensor if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _is_alike(one: tuple[Structure, list[Any]], other: tuple[Structure, list[Any]]) -> bool:
    return one[0] == other[0] and all(
        same_constant(a, b) or (_is_number(a) and _is_number(b) and type(a) is type(b) and _is_close(a, b))
        for a, b in zip(one[1], other[1], strict=True)
    )


def _shown(kind: tuple[Structure, list[Any]]) -> str:
    leaves = ["a tensor" if leaf is torch.Tensor else repr(leaf)[:40] for leaf in kind[1]]
    return ", ".join(leaves[:3]) or "nothing"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_close(one: Any, other: Any) -> bool:
    is_exact = isinstance(one, int) and isinstance(other, int)
    return bool(one == other) if is_exact else isclose(one, other, rel_tol=_ROUNDING, abs_tol=_ROUNDING)


def _begins_with(whole: list[Any], part: list[Any]) -> bool:
    return len(part) <= len(whole) and all(map(is_, whole, part))
