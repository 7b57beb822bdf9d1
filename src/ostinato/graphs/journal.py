"""A journal of what a trial run reads and writes, so that it can be undone and watched.

Warm-ups and recordings must leave no trace. The journal sees every ATen write (also those of custom ops
that declare what they mutate), saves the region about to change, and puts it back on `undo`. A raw kernel
launch shows nothing to it: state that such a kernel changes has to be declared to the runner.

Undoing does not empty the journal: a second run of the same step on the same inputs writes the same
regions, so the same journal undoes that as well, without being active during it.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from .blame import Blame, blamed, frames_now
from .dispatch_mode import WatchingMode
from .forbidden import Forbidden
from .known_calls import refusal
from .memory import byte_range, is_foreign, is_plain, settled, storage_address, tensor_over, tensors_of
from .row_writes import Rows, hits_of, is_masked, rows_of

aten = torch.ops.aten

_SMALL = 1 << 20
"""Bytes of storages that are saved as a whole."""
_SWITCHES = frozenset(("dropout_p", "dropout", "train", "training"))
"""Arguments that are 0 or false where an op that can draw does not."""

# Ops that write arguments their schema does not mark, by position.
_UNDECLARED_WRITES: dict[Any, tuple[int, ...]] = {
    aten.native_batch_norm.default: (3, 4),  # the running statistics
    aten.cudnn_batch_norm.default: (3, 4),
}

_LIFTS = (aten.lift_fresh.default, aten.lift.default)
"""What makes a tensor of a number or a list."""

_CASTS = (aten._to_copy.default,)


def _is_cast_to_integers(given: torch.Tensor, made: list[torch.Tensor]) -> bool:
    return given.is_floating_point() and not any(t.is_floating_point() or t.dtype is torch.bool for t in made)


@cache
def writes(func: Any) -> bool:
    """Whether an op writes any of its arguments."""
    return func._schema.is_mutable or func.namespace == "c10d" or func in _UNDECLARED_WRITES


@cache
def _may_draw(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers: attention and recurrent layers are marked as if all calls did."""
    if not _may_draw(func):
        return False
    return all(value is None or bool(value) for value in given_as(_SWITCHES, func, args, kwargs))


def given_as(
    names: Collection[str], func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[Any]:
    """What a call has for arguments of these names, given or by default."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in names:
            default = kwargs.get(argument.name, argument.default_value)
            yield args[position] if position < len(args) else default


@cache
def _leaves_a_trace(func: Any) -> bool:
    return _may_draw(func) or writes(func)


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors an op is going to write, by its schema."""
    if func.namespace == "c10d":  # in-place collectives carry no alias annotation
        return tensors_of((args, kwargs))
    written = tensors_of([args[i] for i in _UNDECLARED_WRITES.get(func, ()) if i < len(args)])
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written += tensors_of(value)
    return written


def writing_inference_tensors() -> AbstractContextManager[Any]:
    """A context in which tensors made under `inference_mode` may be written outside of it."""
    inside = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    return torch._C._ExcludeDispatchKeyGuard(inside)


def _besides_tensors(value: Any) -> str:
    """Arguments of an op, with only the shapes of tensors."""
    if isinstance(value, torch.Tensor):
        return "?" if is_lazy(value) else str(list(value.shape))
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_besides_tensors, value))})"
    if isinstance(value, dict):
        return str({key: _besides_tensors(item) for key, item in value.items()})
    plain = isinstance(value, bool | int | float | complex | str | torch.dtype | torch.device | None)
    return repr(value) if plain else type(value).__name__


class Hits(NamedTuple):
    """One write to memory from before a run: how often it hit each element."""

    tensor: torch.Tensor
    counts: torch.Tensor | None
    """In a shape that can be broadcast to the tensor's; None if it wrote every element once."""
    is_masked: bool = False
    """Whether several entries for one element show as one."""
    is_opaque: bool = False
    """Whether the call is no operator of torch's: counted is what it changed, maybe memory to work in."""

    @property
    def total(self) -> int:
        """The number of entries that wrote."""
        return self.tensor.numel() if self.counts is None else int(self.counts.sum())


def _not_dense(tensor: torch.Tensor) -> str:
    """Why a tensor like this cannot be in a graph, and where it is used."""
    kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    why = "has no fixed size, and graphs support dense tensors only: keep it out of the step"
    return str(refusal(Forbidden(f"a {kind} tensor", why), frames_now()))


@dataclass(frozen=True)
class WrittenRegion:
    """A region from before a run that the run wrote."""

    tensor: torch.Tensor
    before: torch.Tensor
    rows: Rows | None = None
    """The elements that were written, if not all; `before` has these."""
    hits: Hits | None = None
    """How often each was, if that was counted."""

    def read(self) -> torch.Tensor:
        """What is there now, in memory of its own."""
        now = settled(self.tensor)
        return now.clone() if self.rows is None else self.rows.read(now)


def _give_shape_of(tensor: torch.Tensor | None, before: torch.Tensor) -> None:
    """As an `out=` of another size it may have been resized, perhaps to what its memory did not hold."""
    if tensor is None or tensor.shape == before.shape:
        return
    storage = tensor.untyped_storage()
    if storage.data_ptr() == before.untyped_storage().data_ptr():
        tensor.set_(storage, before.storage_offset(), before.size(), before.stride())  # type: ignore[call-overload]


class SavedWrites:
    """Regions that were there before a run, saved before the run writes them; it sees each call twice.

    `undo()` restores them, as often as it is called.
    """

    def __init__(self, ignore: Iterable[torch.Tensor] = (), *, counts_hits: bool = False) -> None:
        """`ignore`: memory whose contents nobody needs; writes that stay within it are not saved.
        `counts_hits`: count how often each element from before is written."""
        super().__init__()
        self._counts_hits = counts_hits
        self._ignored = [byte_range(tensor) for tensor in ignore]
        # Memory allocated meanwhile, by address. What existed before is never freed and reused for it
        # without becoming new, so an address is enough to tell the two apart.
        self._created: set[int] = set()
        self._undo: list[Callable[[], Any]] = []
        self.regions: list[WrittenRegion] = []
        self._num_looked_at = 0
        self.written: set[int] = set()
        """Addresses of the storages from before that are written."""
        self.written_tensors: list[torch.Tensor] = []
        """One over each of them."""
        self.draws_from_default = False
        """Whether random numbers are drawn from a generator that nobody passes."""
        self.generators: dict[torch.Generator, torch.Tensor] = {}

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call is about to be made."""
        if not _leaves_a_trace(func):
            return
        if draws(func, args, kwargs):
            self._note_draw([*args, *kwargs.values()])
        if writes(func):
            for tensor in written_arguments(func, args, kwargs):
                self._save(func, tensor, args, kwargs)

    def after(self, given: list[torch.Tensor], results: list[torch.Tensor]) -> list[torch.Tensor]:
        """It was made with these tensors and gave those; which of them lie in memory of their own."""
        for at in range(self._num_looked_at, len(self.regions)):
            region = self.regions[at]
            if region.hits is not None and region.hits.is_opaque:
                changed = (settled(region.tensor) != region.before).int()
                self.regions[at] = replace(region, hits=region.hits._replace(counts=changed))
        self._num_looked_at = len(self.regions)
        known = {storage_address(tensor) for tensor in given}
        new = [tensor for tensor in results if storage_address(tensor) not in known]
        self._created.update(map(storage_address, new))
        return new

    @property
    def draws_random(self) -> bool:
        """Whether random numbers are drawn at all."""
        return self.draws_from_default or bool(self.generators)

    def _note_draw(self, given: list[Any]) -> None:
        passed = [value for value in given if isinstance(value, torch.Generator)]
        self.draws_from_default = self.draws_from_default or not passed
        for generator in passed:
            if generator not in self.generators:
                self.generators[generator] = generator.get_state()

    def _save(
        self, func: Any, tensor: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if storage_address(tensor) in self._created or tensor.numel() == 0 or self._is_ignored(tensor):
            return
        target = tensor.detach()
        ref = weakref.ref(tensor)
        self._undo.append(lambda: _give_shape_of(ref(), target))
        if storage_address(tensor) not in self.written:
            self.written.add(storage_address(tensor))
            self.written_tensors.append(target)
            self._save_whole(target)
        rows = rows_of(func, target, args, kwargs)
        hits = None
        if self._counts_hits:
            counts, by_mask = hits_of(func, target, args, kwargs), is_masked(func, args, kwargs)
            is_opaque = func.namespace not in ("aten", "c10d", "_c10d_functional")
            hits = Hits(target, counts, by_mask, is_opaque)
        if rows is None:
            saved = settled(target).clone()
            self._undo.append(lambda: settled(target).copy_(saved))
            self.regions.append(WrittenRegion(target, saved, hits=hits))
        else:
            write, before = rows.write, rows.read(settled(target))
            self._undo.append(lambda: write(settled(target), before))
            self.regions.append(WrittenRegion(target, before, rows, hits))

    def _save_whole(self, target: torch.Tensor) -> None:
        """Saves everything of a small storage: what a wrong graph writes beside can be undone, too."""
        storage = target.untyped_storage()
        if storage.nbytes() <= _SMALL:
            whole = tensor_over(storage, torch.uint8, (storage.nbytes(),), (1,))
            saved = settled(whole).clone()
            self._undo.append(lambda: settled(whole).copy_(saved))

    def _is_ignored(self, tensor: torch.Tensor) -> bool:
        start, end = byte_range(tensor)
        return any(first <= start and end <= last for first, last in self._ignored)

    def undo(self) -> None:
        """Put back every saved region, last write first."""
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), writing_inference_tensors():
            for restore in reversed(self._undo):
                restore()
        for generator, state in self.generators.items():
            generator.set_state(state)


_BAGS = {torch.ops.aten._embedding_bag, torch.ops.aten._embedding_bag_forward_only}
_OFFSETS = (
    "the step makes embedding bags of offsets that it is given, and those of padding do not lie behind those "
    "of rows: pass ids [rows, length] without offsets, with per_sample_weights or padding_idx for short bags"
)


class WriteJournal(SavedWrites, WatchingMode):
    """Active as a context manager; it sees every call itself and takes notes."""

    def __init__(
        self,
        ignore: Iterable[torch.Tensor] = (),
        *,
        counts_hits: bool = False,
        notes_lines: bool = False,
    ) -> None:
        """As above. `notes_lines`: the lines that call the ops, which takes as long as the ops."""
        super().__init__(ignore, counts_hits=counts_hits)
        self._refs: dict[int, StorageWeakRef] = {}
        self._made: list[weakref.ref[torch.Tensor]] = []
        self.reads: dict[int, weakref.ref[torch.Tensor]] = {}
        """What was there before and is used, by the address of its storage: the tensor seen first."""
        self.obstacle: str | None = None
        """Why no graph can do it, if something was used that graphs do not know."""
        self.work: list[tuple[Any, str]] = []
        """The ops in order, with what they were given besides tensors."""
        self.lines: list[Blame] = []
        """The lines that called them, if these are noted."""
        self._notes_lines = notes_lines
        self.rounds_to_few_bits = False
        """Whether numbers of 16 bits or fewer were computed, whatever became of them."""
        self.casts_to_integers = False
        """Whether integers were made of numbers, which may be places."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        if any(is_foreign(tensor) for tensor in given):
            return NotImplemented
        for tensor in given:
            if tensor.layout is not torch.strided or tensor.is_nested:
                if self.obstacle is None:
                    self.obstacle = _not_dense(tensor)
                return func(*args, **kwargs)
        if func.overloadpacket in _BAGS and storage_address(args[2]) not in self._created:
            self.obstacle = self.obstacle or _OFFSETS
        if func.namespace != "profiler":
            is_made_of_numbers = func in _LIFTS and args[0].device.type == "cpu" and args[0].numel() < 64
            besides = str(args[0].tolist()) if is_made_of_numbers else _besides_tensors((args, kwargs))
            self.work.append((func, besides))
            if self._notes_lines:
                self.lines.append(blamed(frames_now()))
        for address, tensor in {storage_address(tensor): tensor for tensor in given}.items():
            if address not in self._created:
                self.reads.setdefault(address, weakref.ref(tensor))
        self.before(func, args, kwargs)
        result = func(*args, **kwargs)
        plain = [tensor for tensor in tensors_of(result) if is_plain(tensor)]
        self.casts_to_integers |= func in _CASTS and _is_cast_to_integers(args[0], plain)
        self.rounds_to_few_bits |= any(t.is_floating_point() and t.itemsize <= 2 for t in plain)
        for tensor in self.after(given, plain):
            self._refs[storage_address(tensor)] = StorageWeakRef(tensor.untyped_storage())
        self._made += [weakref.ref(tensor) for tensor in plain if storage_address(tensor) in self._created]
        return result

    def pass_unseen(self, why_not_captured: str) -> None:
        """Such an operator changes nothing that was there before."""
        self.obstacle = why_not_captured

    def survivors(self) -> set[int]:
        """Addresses of what was made while active and still lives: state that the step keeps."""
        return {address for address, ref in self._refs.items() if address and not ref.expired()}

    def kept(self) -> set[int]:
        """Those of them that somebody holds in Python: libraries keep memory of their own, too."""
        return {storage_address(tensor) for ref in self._made if (tensor := ref()) is not None}
