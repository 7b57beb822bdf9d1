"""Numbers and settings in Python that a captured step has baked in, such as a dropout rate or a loss weight.

A replay runs no Python, so a value changed since the capture would be ignored silently. Before every replay,
everything that model and loss function reach is compared, by identity: see `standing.py`.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from ..capturing import python_draws
from ..dispatching.dispatch import Reason
from ..journal import WriteJournal
from ..memory import storage_address
from ..trees import tensors_in
from ..wrapping.code_names import Ran
from ..wrapping.effects import Change, Effects
from ..wrapping.holders import MISSING, Key
from ..wrapping.reached import Reached
from ..wrapping.standing import Comparison

logger = logging.getLogger("ostinato.graphs")

_MODULE_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_PARAMETER_HOOKS = (attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks"))


class PythonValues:
    """What a model and a loss function use besides tensors."""

    def __init__(
        self,
        *roots: Any,
        with_hooks_of: Callable[[Any], bool] = lambda owner: True,
        runs: str = "steps",
        capture_again: str = "step.capture(inputs, targets)",
    ) -> None:
        """`with_hooks_of`: the modules and tensors whose gradient hooks a graph calls. `runs`,
        `capture_again`: what warnings call that which runs, and the call that captures it again."""
        self._runs, self._capture_again = runs, capture_again
        self._roots, self._with_hooks_of = roots, with_hooks_of
        self._ran = Ran()
        """The code that steps ran: of installed packages, only that counts."""
        self.effects = Effects()
        """What steps leave in Python, and replays as well."""
        self._found: list[Effects] = []
        """All that were found, these and others."""
        self._own: set[Key] = set()
        """What a step assigns itself."""
        self._captured: Reached | None = None
        self._still: Callable[[], bool] = lambda: True
        self._has_same_hooks: Callable[[], bool] = lambda: True
        self._training: list[bool] = []
        self._told: set[str] = set()

    def _reached(self, ignored: Collection[Key] = ()) -> Reached:
        ran, environment = self._ran.codes, self._ran.environment
        return Reached(
            *self._roots,
            ignored=ignored,
            with_hooks_of=self._with_hooks_of,
            ran=ran,
            environment=environment,
        )

    @contextmanager
    def first_step(self) -> Iterator[None]:
        """Around a step: what is assigned inside counts as assigned by the step itself."""
        before = self._reached()
        with self._ran.noted():
            yield
        self._own |= before.changed()
        self.note()

    def find_effects(
        self, before: Reached, run: Callable[[], WriteJournal], besides: Effects | None = None
    ) -> Effects:
        """What steps leave in Python, if trial runs `before` now have changed anything: from more of them.
        `besides`: leave these out."""
        known = set() if besides is None else besides.owners
        if not before.changed() - known:
            return Effects()
        between = self._reached()
        with self._ran.noted():
            journal = run()
        effects, carried_on = between.effects(self._ran.codes, set(journal.reads), known)
        if carried_on is not None:  # `why_no_graph` says so
            return Effects()
        with effects.told_apart(between.accumulates(self._ran.codes)):
            run()
        if besides is None:
            before.add_assigned_once(effects, self._ran.codes)
        self._found.append(effects)
        return effects

    def _assigned(self) -> set[Key]:
        return self._own.union(*(effects.places() for effects in self._found))

    def why_not_left(self, before: Reached) -> str | None:
        """Why replays cannot leave what steps leave in Python, trial runs `before` now among them."""
        effects = self.effects
        if (name := before.left_elsewhere(self._ran.codes, effects, besides=self._assigned())) is not None:
            effects.refuse(name, f"assigns {name} only in some runs")
        return effects.refusal

    @property
    def are_assigned(self) -> bool:
        """Whether the first step assigned something."""
        return bool(self._own)

    @contextmanager
    def put_back(self) -> Iterator[Reached]:
        """Around trial runs: undo what they assign. Yields the values from before."""
        before = self._reached()
        memory = [(tensor, tensor.detach()) for tensor in before.tensors]
        try:
            with python_draws.undone():
                yield before
        finally:
            before.put_back(before.changed())
            for tensor, there in memory:
                if tensor.data_ptr() != there.data_ptr():
                    tensor.data = there

    def why_no_graph(self, run: Callable[[], WriteJournal]) -> str | None:
        """Whether Python carries something from step to step that no replay would. Determined by two more
        runs after trial runs: a new tensor, or other memory for one, that the next step continues from
        (buffers are state, read or not), or anything else that makes the next step do different work."""
        between = self._reached()
        addresses, drawn = [tensor.data_ptr() for tensor in between.tensors], python_draws.generators()
        with self._ran.noted():
            journal = run()
        carried, changes = between.carried(), list(between.differing())
        pairs = zip(between.tensors, addresses, strict=True)
        moved = next((tensor for tensor, address in pairs if tensor.data_ptr() != address), None)
        buffers = {id(module._buffers) for module in between.modules}
        place = f"{self._name_of(moved)}.data" if moved is not None else None
        place = place or next(
            (each.name for each in changes if _goes_on(each, set(journal.reads), buffers)), None
        )
        place = place or between.effects(self._ran.codes, set(journal.reads))[1]
        if place is not None:
            return (
                f"the step keeps state by assigning a new tensor to {place}, and a replay would continue "
                f"from the old one: register it as a buffer, and change it in place (copy_)"
            )
        if python_draws.generators() != drawn:
            return python_draws.WHY_NOT
        again, known = run(), set(map(storage_address, between.tensors))
        if (again.work, again.reads.keys() & known) != (journal.work, journal.reads.keys() & known):
            names = ", ".join(each.name for each in changes[:5])
            return (
                f"two steps with the same inputs do different work, which is decided in Python: "
                f"{names or 'by something that was not found'}. Keep it in a tensor"
            )
        if carried:
            return (
                f"every step changes {', '.join(carried[:3])} in Python and looks at it, and a replay would "
                f"not do: keep it in a tensor and change that in place, or do it outside of the step"
            )
        return None

    def _name_of(self, tensor: torch.Tensor) -> str:
        modules = [root for root in self._roots if isinstance(root, torch.nn.Module)]
        named = [pair for m in modules for pair in (*m.named_parameters(), *m.named_buffers())]
        return next((name for name, own in named if own is tensor), f"a tensor {list(tensor.shape)}")

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Around a capture: from here on, what the step does not assign itself must stay as it is."""
        before = self._reached()
        with python_draws.undone():
            yield
        before.put_back(self._assigned())
        self.note()

    def name_measured(self) -> None:
        """Warn of numbers that replays leave alone, once there are graphs."""
        names, self.effects.measured = self.effects.measured, []
        if names:
            logger.warning(
                "replays run no Python and leave %s as it is, a number that is another one in every step, "
                "whatever the inputs: take it around the steps",
                ", ".join(names[:5]),
            )

    def note(self) -> None:
        """Record the present values as those that graphs have, or will have."""
        self._captured = reached = self._reached(ignored=self._assigned())
        self._still = reached.standing(without=self._tables())
        self._has_same_hooks = _hooks_of_gradients(reached.modules).compiled()
        self._training = reached.training()

    def why_changed(self, *, quietly: bool = False) -> Reason | None:
        """Why a replay would differ from the step as it is now. `quietly`: without a warning."""
        reached = self._captured
        if reached is None or (self._still() and self._has_same_hooks()):
            return None
        if reached.training() != self._training:
            if not quietly and self._not_told(["train() or eval()"]):
                logger.warning(
                    "%s run eagerly while a module is in another mode than at the capture, train() or "
                    "eval(): call %s to capture this one instead",
                    self._runs,
                    self._capture_again,
                )
            return Reason.TRAINING_MODE_CHANGED
        changed = [*reached.changed_values(), *reached.replaced(self._tables()), *reached.added()]
        if not changed and reached.is_same_code() and self._has_same_hooks():
            return None  # equal numbers in different objects
        if not quietly and (new := self._not_told(changed or ["a hook or method of a module or parameter"])):
            logger.warning(
                "%s run eagerly while these differ from the capture: %s. A graph would continue with the "
                "old values: keep what changes in a tensor and change that in place, or pass it as an input",
                self._runs,
                ", ".join(new[:5]),
            )
        return Reason.ATTRIBUTE_CHANGED

    def _not_told(self, names: Sequence[str]) -> list[str]:
        """Those that no warning has named. Entries of a container, which may become more in every step, count
        as one."""
        causes = {re.sub(r"\d+", "", name): name for name in names}
        new = [name for cause, name in causes.items() if cause not in self._told]
        self._told.update(causes)
        return new

    def _tables(self) -> set[int]:
        """The tables of parameters and buffers, by identity: `Places` checks these."""
        modules = [m for root in self._roots if isinstance(root, torch.nn.Module) for m in root.modules()]
        return {id(table) for module in modules for table in (module._parameters, module._buffers)}


def _goes_on(change: Change, reads: Collection[int], buffers: Collection[int]) -> bool:
    """Returns whether other memory stands there now, and what stood there was used, or is a buffer."""
    former = set(map(storage_address, change.former))
    now = set() if change.now is MISSING else set(map(storage_address, tensors_in(change.now)))
    return not now <= former and (id(change.holder) in buffers or not former.isdisjoint(reads))


def _hooks_of_gradients(modules: Sequence[torch.nn.Module]) -> Comparison:
    """What a backward pass calls: hooks of modules and of parameters."""
    found = Comparison()
    for module in modules:
        own = vars(module)
        for name in _MODULE_HOOKS:
            if own.get(name):
                found.add_equal(lambda own=own, name=name: list(own[name].values()))  # type: ignore[misc]
            elif name in own:
                found.add_places([(own, name, own[name])])
                found.add_empty(own[name])
    parameters = [p for module in modules for p in module.parameters(recurse=False)]
    for hooks_of in _PARAMETER_HOOKS:
        found.add_equal(
            lambda hooks_of=hooks_of: (  # type: ignore[misc]
                any(map(hooks_of, parameters)) and [tuple((hooks_of(p) or {}).values()) for p in parameters]
            )
        )
    return found
