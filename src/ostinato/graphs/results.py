"""What a replay hands out: copies of its results, guarded views of the memory they are in, or that memory.

Note [What results share]
A copy has to behave like what the step returns without a graph. Results that overlap (`y` and `y[0]`, the
parts that `chunk` cuts) overlap in the copy, too. A result that is an argument, or a view of one, is that of
the caller's own tensor. Results that outlive replays (a parameter, a table that the step keeps) are not
copied: the caller and the step share them.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeAlias

import torch

from .capturing.pool import Lent
from .checking.stale import GuardedOutput, guarded_by
from .errors import ConfigError
from .memory import byte_range, is_plain, tensor_over, unowned_storage

_ALIGNMENT = 16
"""Bytes: every type fits into this, and every allocation begins at a multiple of it."""


class Results(StrEnum):
    """What a replay returns."""

    COPIED = "copied"
    """Tensors of the caller's own. The copy is made right behind the replay, on the same stream."""
    GUARDED = "guarded"
    """Tensors over memory that the next replay overwrites. Using one afterwards raises StaleOutputError."""
    UNGUARDED = "unguarded"
    """The same tensors, and nothing notices late use, except autograd: for engines, which know when they
    replay."""

    @classmethod
    def parse(cls, text: "str | Results") -> "Results":
        """The kind of results with this name."""
        try:
            return cls(text)
        except ValueError:
            kinds = ", ".join(kind.value for kind in cls)
            raise ConfigError(f"unknown kind of results {text!r}: use one of {kinds}") from None


History: TypeAlias = Callable[[int, torch.Tensor], torch.Tensor]


class HandingOut:
    """How the results of one graph, without padded rows, become what a call returns."""

    def __init__(
        self,
        leaves: Sequence[Any],
        is_volatile: Callable[[torch.Tensor], bool],
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        """`inputs`: the real rows of the input buffers."""
        self._leaves, self._is_volatile = leaves, is_volatile
        self._of_inputs = _OfInputs(leaves, inputs)
        self._copies: dict[tuple[bool, History | None], _Copies] = {}

    def copied(self, batch: Mapping[str, Any] | None, history: History | None = None) -> list[Any]:
        """Leaves in memory of their own, but for those that are the caller's or outlive replays. `history`:
        gives the leaf at a place one for autograd, or returns it as it is. What is copied gets it once, for
        all calls; the copies inherit it."""
        given = self._of_inputs.any and batch is not None and self._of_inputs.are_in(batch)
        copies = self._copies.get((given, history))
        if copies is None:
            leaves = self._of_inputs.others if given else self._leaves
            copies = self._copies[given, history] = _Copies(leaves, self._is_volatile, history)
        made = copies.made()
        if given and batch is not None:
            self._of_inputs.put(made, batch)
        if history is not None:
            for position in copies.without_history:
                if isinstance(made[position], torch.Tensor):
                    made[position] = history(position, made[position])
        return made

    def guarded(self, batch: Mapping[str, Any] | None, lent: Lent, origin: str) -> list[Any]:
        """Leaves over the memory of the replay, with a guard on those that another replay overwrites."""
        given = batch is not None and self._of_inputs.are_in(batch)
        made = [
            leaf
            if not isinstance(leaf, torch.Tensor)
            else guarded_by(leaf.detach(), lent, origin)
            if self._is_volatile(leaf)
            else leaf.detach()
            for leaf in (self._of_inputs.others if given else self._leaves)
        ]
        if given:
            assert batch is not None
            self._of_inputs.put(made, batch)
        return made


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors, plain ones; those that overlap share memory in the copies, too."""
    plain = [tensor.detach().as_subclass(torch.Tensor) for tensor in tensors]
    return _Copies(plain, lambda tensor: True).made()


class _OfInputs:
    """Results that are arguments, or views of them, and where they lie in those."""

    def __init__(self, leaves: Sequence[Any], inputs: Mapping[str, torch.Tensor]) -> None:
        self._whole: list[tuple[int, str]] = []
        self._views: list[tuple[int, str, torch.Tensor, int]] = []
        """Position among the leaves, name of the argument, leaf, and where it begins in bytes."""
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor) or not is_plain(leaf) or leaf.numel() == 0:
                continue
            for name, value in inputs.items():
                if _contains(value, leaf):
                    if _is_the_same(leaf, value):
                        self._whole.append((position, name))
                    else:
                        self._views.append((position, name, leaf, leaf.data_ptr() - value.data_ptr()))
                    break
        viewed = {name for _, name, *_ in self._views}
        names = viewed | {name for _, name in self._whole}
        retyped = {name for _, name, leaf, _ in self._views if not _is_alike(leaf, inputs[name])}
        self._needed = [
            (name, inputs[name].device, inputs[name].stride() if name in viewed else None, name in retyped)
            for name in names
        ]
        own = {position for position, *_ in (*self._whole, *self._views)}
        self.any = bool(own)
        """Whether there are such results."""
        self.others = [None if position in own else leaf for position, leaf in enumerate(leaves)]
        """The other leaves in their places."""

    def are_in(self, batch: Mapping[str, Any]) -> bool:
        """Whether the caller's tensors can stand for the buffers: on the same device and, where results are
        views of them, laid out alike."""
        for name, device, stride, retyped in self._needed:
            value = batch[name]
            if not isinstance(value, torch.Tensor) or isinstance(value, GuardedOutput):
                return False
            if value.device != device or (stride is not None and value.stride() != stride):
                return False
            if retyped and (value.data_ptr() % _ALIGNMENT or value.is_conj() or value.is_neg()):
                return False
        return True

    def put(self, made: list[Any], batch: Mapping[str, Any]) -> None:
        """Put the caller's tensors, or views of them, among the others."""
        for position, name in self._whole:
            made[position] = batch[name].detach()
        for position, name, leaf, begin in self._views:
            value = batch[name].detach()
            if _is_alike(leaf, value):
                offset = value.storage_offset() + begin // leaf.itemsize
                made[position] = value.as_strided(leaf.size(), leaf.stride(), offset)
            else:
                nbytes = byte_range(value)[1] - value.data_ptr()
                flat = value.as_strided((nbytes // value.itemsize,), (1,)).view(torch.uint8)
                made[position] = _part_of(flat, begin, leaf)


class _Copies:
    """Copies of leaves as often as needed. Those that overlap are copied together."""

    def __init__(
        self,
        leaves: Sequence[Any],
        is_volatile: Callable[[torch.Tensor], bool],
        history: History | None = None,
    ) -> None:
        self._leaves = list(leaves)
        self._shared: list[int] = []
        self._alone: list[tuple[int, torch.Tensor, torch.Size | None]] = []
        self._groups: list[_Group] = []
        copied: list[int] = []
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            if not is_plain(leaf):
                self._alone.append((position, leaf, None))
            else:
                (copied if leaf.numel() == 0 or is_volatile(leaf) else self._shared).append(position)
        for group in _overlapping(copied, leaves):
            if len(group) == 1:
                leaf = leaves[group[0]]
                compact = _without_repeats(leaf)
                self._alone.append((group[0], compact, None if compact is leaf else leaf.size()))
            else:
                self._groups.append(_Group(group, [leaves[position] for position in group]))
        self.without_history: list[int] = []
        """The places of leaves that get theirs anew in every call."""
        if history is not None:
            self._alone = [(at, history(at, source), size) for at, source, size in self._alone]
            inherit = {position for position, *_ in self._alone}
            self.without_history = [at for at in range(len(leaves)) if at not in inherit]

    def made(self) -> list[Any]:
        """New copies, in the places of the leaves."""
        made = list(self._leaves)
        for position in self._shared:
            made[position] = made[position].detach()
        for position, source, size in self._alone:
            copy = source.clone()
            made[position] = copy if size is None else copy.expand(size)
        for group in self._groups:
            group.put(made)
        return made


class _Group:
    """Leaves that overlap: one copy of everything between the first byte of any and the last."""

    def __init__(self, positions: Sequence[int], leaves: Sequence[torch.Tensor]) -> None:
        ranges = [byte_range(leaf) for leaf in leaves]
        start, end = min(first for first, _ in ranges), max(last for _, last in ranges)
        plain = len({leaf.dtype for leaf in leaves}) == 1 and not any(
            t.is_conj() or t.is_neg() for t in leaves
        )
        bases = [
            leaf
            for leaf, where in zip(leaves, ranges, strict=True)
            if where == (start, end) and _is_dense(leaf)
        ]
        if plain and bases:
            self._source, self._is_base = bases[0], True
        else:
            start -= start % _ALIGNMENT
            memory = unowned_storage(start, end - start, leaves[0].device)
            self._source, self._is_base = tensor_over(memory, torch.uint8, (end - start,), (1,)), False
        self._parts = [
            (position, leaf, leaf is self._source, leaf.data_ptr() - start)
            for position, leaf in zip(positions, leaves, strict=True)
        ]

    def put(self, made: list[Any]) -> None:
        """Put new copies in the places of the leaves."""
        copy = self._source.clone()
        for position, leaf, is_all, begin in self._parts:
            if is_all:
                made[position] = copy
                continue
            if self._is_base:
                made[position] = copy.as_strided(leaf.size(), leaf.stride(), begin // leaf.itemsize)
            else:
                made[position] = _part_of(copy, begin, leaf)


def _part_of(memory: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    """The view of these bytes that is laid out, and to be read, like another tensor."""
    nbytes = (memory.numel() - begin) // like.itemsize * like.itemsize
    part = memory[begin : begin + nbytes].view(like.dtype)
    part = part.as_strided(like.size(), like.stride(), part.storage_offset())
    part = part.conj() if like.is_conj() else part
    return torch._neg_view(part) if like.is_neg() else part


def _is_the_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    same_place = one.data_ptr() == other.data_ptr() and one.size() == other.size()
    return same_place and one.stride() == other.stride() and _is_alike(one, other)


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether the bytes of both are read in the same way."""
    return (one.dtype, one.is_conj(), one.is_neg()) == (other.dtype, other.is_conj(), other.is_neg())


def _overlapping(positions: Sequence[int], leaves: Sequence[Any]) -> list[list[int]]:
    """The positions, those of tensors whose memory overlaps together."""
    groups: list[list[int]] = []
    reach = 0
    for start, end, position in sorted((*byte_range(leaves[position]), position) for position in positions):
        if groups and start < min(reach, end):
            groups[-1].append(position)
        else:
            groups.append([position])
        reach = max(reach, end)
    return groups


def _contains(outer: torch.Tensor, inner: torch.Tensor) -> bool:
    (first, last), (start, end) = byte_range(outer), byte_range(inner)
    return outer.device == inner.device and first <= start and end <= last


def _is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether it fills its memory, each place once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Without what `expand` repeats: the copy repeats it as well."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
