"""Results that would have gradients without graphs: differentiating through them raises an error that says
what to use instead.

Note [Which results would have gradients]
That parameters require gradients does not say it: the function may run under `no_grad`, or detach what it
returns. So a call that enables gradients runs the function once more, eagerly, for each set of tensors that
require them, and looks.
"""

from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Any

import torch

from ..errors import ConfigError
from ..inputs.buffers import Batch
from ..trees import Maker, flatten, map_tensors, tensors_in

_requires_grad = attrgetter("requires_grad")


class Refused:
    """Gives results the history of what raises an error when it is differentiated."""

    def __init__(self, places: Collection[int] | None, by: Sequence[torch.Tensor], *, lasts: bool) -> None:
        """`places`: which results; None: all. `by`: what they would be differentiated by. `lasts`: whether
        that is the same in other calls."""
        self._places, self._by, self.lasts = places, by, lasts

    def __call__(self, place: int, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, with that history if it is one of these."""
        if not tensor.is_floating_point() or (self._places is not None and place not in self._places):
            return tensor
        made: torch.Tensor = _Refusal.apply(tensor, *self._by)  # type: ignore[no-untyped-call]
        return made


class Differentiable:
    """Tells which results of one kind of call would have gradients, see the Note."""

    def __init__(
        self, reads: Sequence[torch.Tensor], look: Callable[[Sequence[bool]], Collection[int] | None]
    ) -> None:
        """`reads`: what the function uses besides its arguments. `look`: runs it with arguments that require
        gradients or do not; the places of results that have some then, or None if that cannot be told."""
        self._reads, self._look = reads, look
        self._known: dict[tuple[bool, ...], Collection[int] | None] = {}
        self._read: list[bool] | None = None
        """Which of `reads` required gradients in the last call whose arguments did not."""
        self._refused: Refused | None = None
        """What was refused in that."""
        self._maker: Maker | None = None

    def refused(self, batch: Batch, *, is_plain: bool) -> Refused | None:
        """Returns what has to be refused of the results of a call; None if none would have gradients.
        `is_plain`: no argument requires gradients."""
        read = list(map(_requires_grad, self._reads))
        if is_plain and read == self._read:
            return self._refused
        # An argument may be a result that is overwritten by now.
        with torch._C.DisableTorchFunctionSubclass():
            given = list(map(_requires_grad, batch.values()))
        wanted, which = (*given, *read), None
        if True in wanted:
            if wanted not in self._known:
                self._known[wanted] = self._look(given)
            which = self._known[wanted]
        refused = None
        if True in wanted and (which is None or which):
            by = [value for value, is_wanted in zip(batch.values(), given, strict=True) if is_wanted]
            if True in read:
                by.append(self._reads[read.index(True)])
            refused = Refused(which, by, lasts=True not in given)
        if True not in given:
            self._read, self._refused = read, refused
        return refused

    def refusing(self, results: Any, refused: Refused | None) -> Any:
        """The same results; `backward` through those that would have gradients raises."""
        if refused is None:
            return results
        leaves, structure = flatten(results)
        if self._maker is None or not self._maker.is_for(structure, leaves):
            self._maker = Maker(structure, leaves)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[place] = refused(place, leaf)
        return self._maker.made(leaves)


def require_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether an argument does."""
    given = (*args, *kwargs.values())
    plain = all(isinstance(value, torch.Tensor) for value in given)
    return any(map(_requires_grad, given if plain else tensors_in(given)))


def places_with_gradients(results: Any) -> frozenset[int]:
    """Which leaves have gradients."""
    leaves = enumerate(flatten(results)[0])
    return frozenset(at for at, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad)


def without_gradients(results: Any) -> Any:
    """The same results; `backward` through those that have gradients raises an error that names the calls for
    training."""

    def refuse(tensor: torch.Tensor) -> Any:
        if not tensor.requires_grad:
            return tensor
        return _Refusal.apply(tensor.detach(), tensor)  # type: ignore[no-untyped-call]

    return map_tensors(refuse, results)


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *by: torch.Tensor) -> torch.Tensor:
        return tensor.data  # no view, which could not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ConfigError(
            "graphed() is for inference: its results carry no gradients. To train from graphs use "
            "ostinato.graphs.graphed_train_step for a whole step, or ostinato.graphs.make_graphed_callables "
            "for parts of a model. For inference run under torch.no_grad(); where something else in the loss "
            "is trained, also freeze the parameters with requires_grad_(False), and detach() the arguments"
        )
