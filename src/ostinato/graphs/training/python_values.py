"""Numbers and settings in Python that a captured step has baked in: a chance of dropout, a weight of a loss.

A replay runs no Python, so a value that was changed since the capture would be ignored without a word. Before
every replay all that model and loss function reach is compared, by identity: see `standing.py`.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from ..capturing import python_draws
from ..dispatching.dispatch import Reason
from ..wrapping.holders import Key
from ..wrapping.reached import Reached
from ..wrapping.standing import Comparison

logger = logging.getLogger("ostinato.graphs")

_MODULE_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_PARAMETER_HOOKS = (attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks"))


class PythonValues:
    """What a model and a loss function look at besides tensors."""

    def __init__(self, *roots: Any, with_hooks_of: Callable[[Any], bool] = lambda owner: True) -> None:
        """`with_hooks_of`: which modules and tensors have hooks of gradients that a graph calls."""
        self._roots, self._with_hooks_of = roots, with_hooks_of
        self._has_named_assigned = False
        self._own: set[Key] = set()
        """What a step assigns itself."""
        self._captured: Reached | None = None
        self._still: Callable[[], bool] = lambda: True
        self._has_same_hooks: Callable[[], bool] = lambda: True
        self._training: list[bool] = []
        self._has_warned = False

    def _reached(self, ignored: Collection[Key] = ()) -> Reached:
        return Reached(*self._roots, ignored=ignored, with_hooks_of=self._with_hooks_of)

    @contextmanager
    def first_step(self) -> Iterator[None]:
        """Around a step: what is assigned in it, it assigns itself."""
        before = self._reached()
        yield
        self._own |= before.changed()

    @property
    def are_assigned(self) -> bool:
        """Whether the first step assigned something."""
        return bool(self._own)

    @contextmanager
    def put_back(self) -> Iterator[Reached]:
        """Around trial runs: they count for nothing. As things are before them."""
        before = self._reached()
        try:
            with python_draws.undone():
                yield before
        finally:
            before.put_back(before.changed())

    def carried_on(self, before: Reached, reads_of_a_run: Callable[[], set[int]]) -> str | None:
        """Where a step keeps state by assigning a new tensor, if trial runs since `before` assigned any: one
        more run tells whether it goes on from what those left. Buffers are state, read or not."""
        if not before.assigned():
            return None
        between = self._reached()
        reads = reads_of_a_run()
        buffers = {id(module._buffers) for module in between.modules}
        return between.assigned().goes_on_from_former(reads, buffers)

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Around a capture: from here on, what was not assigned by the step itself has to stay as it is."""
        before = self._reached()
        with python_draws.undone():
            yield
        self._name_assigned_since(before)
        before.put_back(self._own)
        self.note()

    @contextmanager
    def named(self) -> Iterator[None]:
        """Around trial runs behind the first: what these assign, every run assigns."""
        before = self._reached()
        yield
        self._name_assigned_since(before)

    def _name_assigned_since(self, before: Reached) -> None:
        assigned = list(dict.fromkeys([*before.changed_values(), *before.assigned().names, *before.grown()]))
        if assigned and not self._has_named_assigned:
            self._has_named_assigned = True
            logger.warning(
                "every step assigns %s in Python: a replay runs no Python, leaves it as it is, and goes on "
                "with the value of the capture. Keep it in a buffer if it matters",
                ", ".join(assigned[:5]),
            )

    def note(self) -> None:
        """As it is now is as graphs have it."""
        self._captured = reached = self._reached(ignored=self._own)
        self._still = reached.standing(without=self._tables())
        self._has_same_hooks = _hooks_of_gradients(reached.modules).compiled()
        self._training = reached.training()

    def why_changed(self) -> Reason | None:
        """Why a replay would do something else than the step as it is now."""
        reached = self._captured
        if reached is None or (self._still() and self._has_same_hooks()):
            return None
        if reached.training() != self._training:
            return Reason.TRAINING_MODE_CHANGED
        changed = [*reached.changed_values(), *reached.replaced(self._tables()), *reached.added()]
        if not changed and reached.is_same_code() and self._has_same_hooks():
            return None  # equal numbers, only not the same objects
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "steps run eagerly while %s is not as at the capture: a graph would go on with what it was. "
                "Keep what changes in a tensor and change that in place, or pass it as an input",
                ", ".join(changed[:5]) or "a hook or method of a module or parameter",
            )
        return Reason.ATTRIBUTE_CHANGED

    def _tables(self) -> set[int]:
        """Where parameters and buffers stand, by identity: `Places` looks after these."""
        modules = [m for root in self._roots if isinstance(root, torch.nn.Module) for m in root.modules()]
        return {id(table) for module in modules for table in (module._parameters, module._buffers)}


def _hooks_of_gradients(modules: Sequence[torch.nn.Module]) -> Comparison:
    """What a backward pass calls: hooks of modules and of parameters."""
    found = Comparison()
    for module in modules:
        own = vars(module)
        for name in _MODULE_HOOKS:
            if own.get(name):
                found.add_equal(lambda own=own, name=name: list(own[name].values()))  # type: ignore[misc]
            elif name in own:
                found.add_empty(own, name)
    parameters = [p for module in modules for p in module.parameters(recurse=False)]
    for hooks_of in _PARAMETER_HOOKS:
        found.add_equal(
            lambda hooks_of=hooks_of: (  # type: ignore[misc]
                any(map(hooks_of, parameters)) and [tuple((hooks_of(p) or {}).values()) for p in parameters]
            )
        )
    return found
