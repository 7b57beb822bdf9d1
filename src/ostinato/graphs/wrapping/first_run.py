"""A function run once on real inputs, before anything is captured: what it does, and whether a graph can."""

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from types import CodeType
from typing import Any

import torch

from ..backends import backend_for
from ..blame import line_using
from ..capturing import python_draws
from ..capturing.autocast import clean_autocast_cache
from ..capturing.segments import eager_calls_by
from ..capturing.trial import Trials
from ..checking.sharded import why_sharded
from ..dispatching.mode import GraphMode
from ..dispatching.step_mode import step_mode
from ..errors import OstinatoError
from ..inputs.buffers import Batch
from ..memory import storage_address
from ..results import HandingOut, copies_of
from ..trees import flatten
from .code_names import Ran
from .effects import Change, Effects
from .holders import Key
from .in_place import geometry
from .reached import Reached
from .signature import Signature


class SameObjects:
    """Results that are the very object that another result is, an argument, or a tensor of the function."""

    def __init__(
        self, leaves: Sequence[Any], arguments: Mapping[str, torch.Tensor], own: Sequence[torch.Tensor]
    ) -> None:
        names, lasting = {id(value): name for name, value in arguments.items()}, {id(one): one for one in own}
        first: dict[int, int] = {}
        self._known: list[tuple[int, str | torch.Tensor]] = []
        self._again: list[tuple[int, int]] = []
        """Positions, and the name of the argument, the tensor, or the position of the same before."""
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            if first.setdefault(id(leaf), position) != position:
                self._again.append((position, first[id(leaf)]))
            elif id(leaf) in names:
                self._known.append((position, names[id(leaf)]))
            elif id(leaf) in lasting:
                self._known.append((position, lasting[id(leaf)]))

    def __bool__(self) -> bool:
        return bool(self._known or self._again)

    def narrow_down(self, result: Any, arguments: Mapping[str, torch.Tensor]) -> None:
        """Take in a run of another size: what is the same object only at some sizes is none of these."""
        leaves, _ = flatten(result)
        try:
            self._known = [
                (at, one)
                for at, one in self._known
                if leaves[at] is (arguments[one] if isinstance(one, str) else one)
            ]
            self._again = [(at, before) for at, before in self._again if leaves[at] is leaves[before]]
        except IndexError:  # of such results no graph is made
            self._known, self._again = [], []

    def restored(self, result: Any, batch: Batch) -> Any:
        """The result with these objects in their places."""
        leaves, structure = flatten(result)
        for position, known in self._known:
            leaves[position] = batch[known] if isinstance(known, str) else known
        for position, before in self._again:
            leaves[position] = leaves[before]
        return structure.filled(leaves)


class EagerChanges:
    """Goes along with functions marked `@eager_boundary`, and tells what is changed inside and outside."""

    def __init__(self, before: Reached) -> None:
        """`before`: what there was when the run began."""
        self._before = before
        self._is_inside = False
        self._last: dict[Key, Change] = {}
        self._changed: dict[bool, dict[Key, str]] = {True: {}, False: {}}

    @property
    def breaks(self) -> bool:
        """Marked functions that another one calls are part of that."""
        return not self._is_inside

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it, and look before and behind."""
        self._look(inside=False)
        self._is_inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self._is_inside = False
            self._look(inside=True)

    def found(self) -> tuple[set[Key], set[str]]:
        """What is changed inside alone, by place; what is changed both inside and outside, by name."""
        self._look(inside=False)
        inside, outside = self._changed[True], self._changed[False]
        return inside.keys() - outside.keys(), {inside[place] for place in inside.keys() & outside.keys()}

    def _look(self, *, inside: bool) -> None:
        now = {change.place: change for change in self._before.differing()}
        for place in now.keys() | self._last.keys():
            one, other = self._last.get(place), now.get(place)
            if one is None or other is None or not one.is_still(other):
                self._changed[inside][place] = (one or other).name  # type: ignore[union-attr]
        self._last = now


class FirstRun:
    """Runs on copies of the inputs. What it raises is what the function raises, and undone."""

    def __init__(
        self,
        function: Callable[..., Any],
        signature: Signature,
        batch: Batch,
        device: torch.device,
        generators: tuple[torch.Generator, ...],
        *,
        may_stay: bool,
        piecewise: bool = False,
    ) -> None:
        """`may_stay`: whether this is a call, so that what cannot be undone may stand. `piecewise`: replays
        call functions marked `@eager_boundary`."""
        self._piecewise = piecewise
        self.refusal: str | None = None
        """Why no graph can do what it does."""
        self.effects = Effects(lambda name: line_using(name, self.ran.codes or ()))
        """What it leaves in Python in every call, besides its result."""
        self.changes: set[Key] = set()
        """What it assigns in every call."""
        self.grown: set[int] = set()
        """Holders, by identity, that it assigned in or added to, be it in this run alone."""
        self.reads: set[int] = set()
        """Addresses of the storages that it used."""
        self.written_elsewhere: set[int] = set()
        """Of these, and of storages that it makes, those that it writes."""
        self.ran = Ran()
        """The code that ran."""
        backend, ran = backend_for(device), self.ran
        trials = Trials(backend, generators=generators)
        before = Reached(function, *signature.functions, ran=())
        self.written: tuple[str, ...] = ()
        """Arguments that it changes in place."""
        self.result: Any = None
        """What it returned, if this run was the call."""
        self.same = SameObjects([], {}, [])
        """Which results are one object, or one that the caller has."""
        self.stays = self.writes_inference_tensors = False
        self.refusal = before.why_closed() or why_sharded(before.modules)
        if self.refusal is not None:
            return
        given = set(map(storage_address, batch.values()))
        # A copy of what the function also reaches in another way is not the same to it.
        is_call, may_stay = may_stay, may_stay and given.isdisjoint(map(storage_address, before.tensors))
        drawn, put_back_draws = python_draws.generators(), python_draws.putting_back()
        changed = None
        try:
            try:
                copies = _copies(batch)
                result, refilled, reshaped = _run(function, signature, copies, trials, ran)
            except Exception as error:
                if not is_call or isinstance(error, OstinatoError):
                    raise
                trials.undo()
                before.put_back(before.changed())
                # Whoever raises without being watched, too, raises that.
                copies = _copies(batch) if may_stay else dict(batch)
                result, refilled, reshaped = _run(function, signature, copies, trials, ran, observed=False)
                told = f"{type(error).__name__}: {error}"
                self.refusal = f"the step works, but fails when observed, which a capture requires: {told}"
            # A copy: so whatever of it is alive afterwards is state of the function's.
            leaves, structure = flatten(result)
            self.same = SameObjects(leaves, copies, before.tensors)
            refs = [weakref.ref(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
            returned = HandingOut(leaves, lambda leaf: True, copies).copied(batch) if is_call else []
            del result, leaves
            changed = before.changed()
            self.grown = {holder for holder, _ in changed}
            # What was put into the caller's containers is not there, so that such a run cannot be the call.
            self.stays = self.refusal is not None or (may_stay and not refilled and trials.makes_state)
            own = {storage_address(copy) for copy in copies.values()}
            self.written = tuple(n for n, copy in copies.items() if trials.wrote(storage_address(copy)))
            self.reads = {storage_address(tensor) for tensor in trials.reads} - own
            is_known = self.refusal is None
            if trials.obstacle is not None:
                self.refusal = trials.obstacle
            elif drawn != python_draws.generators():
                self.refusal = self.refusal or python_draws.WHY_NOT
            elif refilled:
                self.refusal = self.refusal or (
                    f"the step puts something else into its argument {', '.join(refilled)} (a list, "
                    f"dictionary or object), and a replay would not: return it, or write to the tensors in it"
                )
            elif reshaped:
                self.refusal = self.refusal or (
                    f"the step changes the shape or the memory of its argument {', '.join(reshaped)} "
                    f"(unsqueeze_, resize_, set_, .data =), and a replay would not: make a new tensor "
                    f"(unsqueeze, view) instead"
                )
            if is_known and (changed or trials.makes_state or trials.draws_random):
                second = Trials(backend) if self.stays else trials
                self._look_twice(function, signature, batch, trials, second, before)
                self.written_elsewhere |= second.written
            self.written_elsewhere |= trials.written - own
            if self.stays:
                for name in {*self.written, *reshaped}:
                    _give_back(copies[name], batch[name], is_reshaped=name in reshaped)
                for place, ref in enumerate(refs):
                    kept = None if ref is None else ref()
                    if kept is not None and storage_address(kept) not in own:
                        returned[place] = kept  # state of the function's, which it may go on to change
                self.result = structure.filled(returned)
        except BaseException:
            trials.undo()
            before.put_back(self.changes or changed or before.changed())
            raise
        self.writes_inference_tensors = trials.writes_inference_tensors
        if not self.stays:
            trials.undo()
            replayed = self.effects.owners - self.effects.alone
            before.put_back(replayed)
            # An attribute that every run makes anew is there after a call, too.
            before.put_back(self.changes - replayed, but_new=self.refusal is None)
            if drawn != python_draws.generators():
                put_back_draws()

    def _look_twice(
        self,
        function: Callable[..., Any],
        signature: Signature,
        batch: Batch,
        first: Trials,
        second: Trials,
        at_first: Reached,
    ) -> None:
        """What was made in the first run is there in the second: what is assigned then is assigned always.
        `at_first`: what there was before the first run."""
        before, ran = Reached(function, *signature.functions, ran=()), self.ran
        ended, generators = torch.get_rng_state(), first.generators
        draws = first.draws_from_default
        try:
            if draws:
                torch.rand(
                    1, device="cpu"
                )  # begin elsewhere: a step that ends in the same place anyway has seeded
            copies, eager = _copies(batch), EagerChanges(before)
            with eager_calls_by(eager) if self._piecewise else nullcontext():
                _run(function, signature, copies, second, ran)
            self.changes, carried = before.changed(), before.carried(ran.codes)
            reads = {storage_address(tensor) for tensor in second.reads}
            by_replays, by_both = eager.found() if self._piecewise else (set(), set())
            self.effects, carried_on = before.effects(ran.codes, reads, besides=by_replays)
            self.effects.leave_to_replays(by_replays, by_both)
            if carried_on is None and second.made_last() - self.effects.storages():
                carried_on = "a place that could not be found"
            own_generator = first.draws_random and not (second.generators <= generators)
            seeds = draws and second.drew_last and torch.equal(torch.get_rng_state(), ended)
            if self.effects and not (carried or carried_on):
                with self.effects.told_apart(before.accumulates(ran.codes)):
                    _run(function, signature, _copies(batch), second, ran)
        finally:
            if draws:
                torch.set_rng_state(ended)
            second.undo()
            before.put_back(before.changed())
        at_first.add_assigned_once(self.effects, ran.codes)
        self.changes |= self.effects.owners
        if self.refusal is not None:
            return
        if carried:
            self.refusal = (
                f"the step changes {', '.join(carried[:3])} in Python at every call and looks at it, which a "
                f"replay would not do: keep it in a tensor and change that in place, or do it outside"
                f"{_at_line(carried[0], ran.codes or ())}"
            )
        elif carried_on is not None:
            self.refusal = (
                f"the step keeps state by assigning a new tensor to {carried_on}, but replays use the old "
                f"tensor: change it in place (copy_, index_copy_){_at_line(carried_on, ran.codes or ())}"
            )
        elif own_generator or (seeds and second.device.type == "cpu"):
            self.refusal = (
                "the step seeds its random numbers itself, and a replay would continue the sequence instead: "
                "create the numbers, or the generator, outside of the step"
            )
        elif self.effects.refusal is not None:
            self.refusal = self.effects.refusal


def _copies(batch: Batch) -> dict[str, torch.Tensor]:
    return dict(zip(batch, copies_of(list(batch.values())), strict=True))


def _at_line(name: str, codes: Collection[CodeType]) -> str:
    line = line_using(name, codes)
    return f" (at {line})" if line else ""


def _run(
    function: Callable[..., Any],
    signature: Signature,
    inputs: dict[str, torch.Tensor],
    trials: Trials,
    ran: Ran,
    *,
    observed: bool = True,
) -> tuple[Any, list[str], list[str]]:
    """The result, the arguments into which the function puts something else, and the inputs to which it gives
    another shape or other memory."""
    before = {name: geometry(value) for name, value in inputs.items()}
    with step_mode(GraphMode.NONE), torch.no_grad(), clean_autocast_cache(), ran.noted():
        step = lambda: signature.call_and_look(function, inputs)  # noqa: E731
        result, refilled = trials.run_for_good(step, observed=observed)
    return result, refilled, [name for name, value in inputs.items() if geometry(value) != before[name]]


def _give_back(copy: torch.Tensor, original: torch.Tensor, *, is_reshaped: bool) -> None:
    """Let the caller's tensor have what its copy has now."""
    if copy is original:
        return
    if is_reshaped:
        original.data = copy
    else:
        with torch.no_grad():
            original.copy_(copy)
