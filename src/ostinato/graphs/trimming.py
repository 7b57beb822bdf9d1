"""Which rows of an output are real."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from .dispatching.descriptor import BatchDescriptor, BatchShape
from .errors import CaptureError
from .inputs.fields import Extent
from .trees import flatten_with_names

Follows = tuple[Extent, int]
"""What a dimension's size follows, and how many rows it has for each."""

_FIXED: Follows = (Extent.FIXED, 1)


class _Seen:
    """One output, as all sizes so far allow it to be read."""

    def __init__(self, leaf: Any) -> None:
        self.first = leaf if not isinstance(leaf, torch.Tensor) else tuple(leaf.shape)
        self.is_tensor = isinstance(leaf, torch.Tensor)
        self.dims: list[set[Follows] | None] = [None] * leaf.dim() if self.is_tensor else []

    def narrow_down(
        self, leaf: Any, possible: Sequence[tuple[Follows, int]], tokens: int, *, several_each: bool
    ) -> str | None:
        """Take in another size; what is wrong with it, if anything. `several_each`: whether a dimension may
        have any number of rows for each token."""
        if not self.is_tensor or not isinstance(leaf, torch.Tensor):
            return None if not self.is_tensor and same_constant(leaf, self.first) else self._differs(leaf)
        if leaf.dim() != len(self.dims):
            return f"has {len(self.dims)} dimensions at one size and {leaf.dim()} at another"
        for dim, size in enumerate(leaf.shape):
            consistent = {follows for follows, rows in possible if rows == size}
            if several_each and size > tokens and size % tokens == 0:
                consistent.add((Extent.TOKEN, size // tokens))
            if self.first[dim] == size:
                consistent.add(_FIXED)
            before = self.dims[dim]
            self.dims[dim] = now = consistent if before is None else consistent & before
            if not now:
                return (
                    f"has {self.first[dim]} rows along dimension {dim} at one size and {size} at another: "
                    f"neither one per token, nor one per request, nor a fixed number, so padding cannot be "
                    f"cut off. Return rows of which each belongs to one row of the inputs, in their order"
                )
        return None

    def _differs(self, leaf: Any) -> str:
        before, now = "a tensor" if self.is_tensor else _shown(self.first), _shown(leaf)
        how, instead = f"is {before} at one size and {now} at another", "compute it outside of the step"
        if before == now:
            how, instead = (
                f"is {now} that every call creates anew",
                "leave it out (for example use_cache=False)",
            )
        return f"{how}: a replay would return the captured one. Return tensors, or {instead}"


class Trimmer:
    """Learns which dimensions of an output follow the tokens or requests of a batch, and which do not.

    One size can mislead (a feature dimension equal to the batch, as many requests as tokens); several do
    not. The runner shows it every rung, and, where that leaves a doubt, one batch of another size.
    """

    def __init__(self, dim: int = 0, rows_per_request: int = 1, *, several_each: bool = False) -> None:
        """`dim`: where outputs count their rows if sizes do not tell. `rows_per_request`: outputs may have so
        many rows for each request, those of one request behind another's. `several_each`: they may have any
        number of rows for each token, the same for all; only where contents are compared afterwards, because
        sizes do not tell whose rows come first."""
        self._dim = dim
        self._rows_per_request = rows_per_request
        self._several_each = several_each
        self._names: list[str] | None = None
        self._seen: list[_Seen] = []
        self._sizes: set[tuple[int, int]] = set()
        self._refusal: str | None = None

    def copy(self) -> "Trimmer":
        """One that has seen the same, and may see more."""
        twin = Trimmer(self._dim, self._rows_per_request, several_each=self._several_each)
        twin._names, twin._sizes, twin._refusal = self._names, set(self._sizes), self._refusal
        twin._seen = [copy.copy(seen) for seen in self._seen]
        for seen in twin._seen:
            seen.dims = list(seen.dims)  # the sets in it are replaced, never changed
        return twin

    def observe(self, descriptor: BatchDescriptor, output: Any) -> None:
        """Take in what the step returned at one size."""
        tokens, reqs = descriptor.num_tokens, descriptor.num_reqs
        self._sizes.add((tokens, reqs))
        named, _ = flatten_with_names(output)
        if self._names is None:
            self._names = [f"output{name}" for _, name, _ in named]
            self._seen = [_Seen(leaf) for *_, leaf in named]
        if [f"output{name}" for _, name, _ in named] != self._names:
            self._refuse(
                f"the structure of the output depends on the batch: {len(self._names)} values at one size, "
                f"{len(named)} at another ({', '.join(self._names[:3])}, ...)"
            )
            return
        possible = [((Extent.TOKEN, 1), tokens), ((Extent.REQUEST, 1), reqs)]
        if self._rows_per_request > 1:
            possible.append(((Extent.REQUEST, self._rows_per_request), reqs * self._rows_per_request))
        for name, seen, (*_, leaf) in zip(self._names, self._seen, named, strict=True):
            wrong = seen.narrow_down(leaf, possible, tokens, several_each=self._several_each)
            if wrong is not None:
                self._refuse(f"{name} {wrong}")

    def in_doubt(self, *, tokens_are_requests: bool) -> bool:
        """Whether another size could tell more. Decode has a token for every request."""
        if self._refusal or self._sizes <= {(1, 1)}:
            return False
        if len(self._sizes) < 2:
            return any(seen.dims or not seen.is_tensor for seen in self._seen)
        same: set[Follows] = {(Extent.TOKEN, 1), (Extent.REQUEST, 1)} if tokens_are_requests else set()
        dims = [dim for seen in self._seen for dim in seen.dims]
        return any(dim is not None and len(dim) > 1 and dim != same for dim in dims)

    def check(self) -> None:
        """CaptureError, naming it, if padding cannot be kept out of some output."""
        if self._refusal:
            raise CaptureError(self._refusal)

    @property
    def with_several_each(self) -> list[str]:
        """The names of outputs with several rows for each token."""
        return [
            name
            for position, name in enumerate(self.names)
            if any(
                extent is Extent.TOKEN and each > 1
                for extent, each in map(partial(self._follows, position), range(self._dims_of(position)))
            )
        ]

    @property
    def names(self) -> list[str]:
        """The outputs' names, in the order of the flattened result."""
        return self._names or []

    def trim(self, position: int, leaf: torch.Tensor, shape: BatchShape) -> torch.Tensor:
        """The real rows of an output."""
        for dim in range(leaf.dim()):
            extent, each = self._follows(position, dim)
            if extent is not Extent.FIXED:
                rows = each * (shape.num_tokens if extent is Extent.TOKEN else shape.num_reqs)
                leaf = leaf.narrow(dim, 0, rows)
        return leaf

    def _follows(self, position: int, dim: int) -> Follows:
        """The likeliest reading, where several are left: rows in the declared dimension and in no other."""
        possible = self._seen[position].dims[dim] or {_FIXED}
        rows = [(Extent.TOKEN, 1), (Extent.REQUEST, 1), (Extent.REQUEST, self._rows_per_request)]
        order: list[Follows] = [*rows, _FIXED] if dim == self._dim else [_FIXED, *rows]
        return next((follows for follows in order if follows in possible), min(possible))

    def _dims_of(self, position: int) -> int:
        return len(self._seen[position].dims)

    def _refuse(self, why: str) -> None:
        self._refusal = self._refusal or why


def same_constant(a: Any, b: Any) -> bool:
    """Whether two Python values are the same to a step: of one type and equal; 0.0 is not -0.0."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, float | complex | np.inexact):
        return repr(a) == repr(b)
    if type(a) is tuple:
        return len(a) == len(b) and all(map(same_constant, a, b))
    if type(a) is dict:
        return list(a) == list(b) and all(map(same_constant, a.values(), b.values()))
    try:
        return bool(a == b)
    except Exception:  # arrays and tensors, and whatever else will not say: equal only if they are the same
        return False


def _shown(value: Any) -> str:
    plain = isinstance(value, int | float | complex | str | bytes | tuple | None)
    return repr(value) if plain else f"a {type(value).__name__}"
