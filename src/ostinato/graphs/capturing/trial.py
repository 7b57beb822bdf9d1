"""Trial runs that leave no trace: warm-ups, and the runs that verification compares with."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from ..backends import Backend
from ..blame import Blame
from ..errors import CaptureError
from ..journal import WriteJournal, WrittenRegion, writing_inference_tensors
from ..memory import settled


class Change(NamedTuple):
    """Holds the contents of a tensor before and after a step."""

    before: torch.Tensor
    after: torch.Tensor


class Trials:
    """Runs a step as often as needed; afterwards state, counters and random generators are as before.

    What a step changes is found by a journal. If the owner of the step has declared its state, that is saved
    instead and nothing is observed: needed for raw kernel launches, which the journal cannot see, and
    cheaper. State that a step makes in its first run and changes in the next cannot be undone: refused.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        state: Mapping[str, torch.Tensor] | None = None,
        sinks: Mapping[str, torch.Tensor] | None = None,
        generators: tuple[torch.Generator, ...] = (),
    ) -> None:
        """`sinks`: memory that padded rows may write, whose contents nobody needs."""
        self._backend = backend
        self._state = state
        self._saved = {name: settled(tensor).clone() for name, tensor in (state or {}).items()}
        self._sinks = dict(sinks or {})
        self._journals: list[WriteJournal] = []
        self._generators = [(generator, generator.get_state()) for generator in generators]
        self._rng = backend.rng_state()
        self._host_rng = torch.get_rng_state()
        self._rewinds = state is not None
        self._notes_lines = False
        self.writes_inference_tensors = False
        """Whether a step that was run writes tensors made under `inference_mode`."""

    @property
    def reads(self) -> list[torch.Tensor]:
        """What the last observed run used besides what it made itself, and what is still there."""
        refs = self._journals[-1].reads.values() if self._journals else ()
        return [tensor for ref in refs if (tensor := ref()) is not None]

    @property
    def work(self) -> list[tuple[Any, str]]:
        """The ops of the last observed run."""
        return self._journals[-1].work if self._journals else []

    @property
    def rounds_to_few_bits(self) -> bool:
        """Whether an observed run computed in 16 bits or fewer."""
        return any(journal.rounds_to_few_bits for journal in self._journals)

    @property
    def casts_to_integers(self) -> bool:
        """Returns whether an observed run made integers of numbers."""
        return any(journal.casts_to_integers for journal in self._journals)

    @property
    def regions(self) -> list[WrittenRegion]:
        """What the last observed run wrote of what was there before."""
        return self._journals[-1].regions if self._journals else []

    @property
    def writes(self) -> bool:
        """Returns whether an observed run wrote anything that was there before."""
        return any(journal.written for journal in self._journals)

    @property
    def draws_random(self) -> bool:
        """Whether an observed run drew random numbers."""
        return any(journal.draws_random for journal in self._journals)

    @property
    def makes_state(self) -> bool:
        """Whether something that an observed run made outlives it."""
        if not any(journal.survivors() for journal in self._journals):
            return False
        gc.collect()  # what lies in circles of references, as autograd and compilers leave, is no state
        return any(journal.survivors() for journal in self._journals)

    @property
    def draws_from_default(self) -> bool:
        """Whether an observed run drew from a generator that nobody passed."""
        return any(journal.draws_from_default for journal in self._journals)

    @property
    def generators(self) -> set[torch.Generator]:
        """The generators that observed runs passed."""
        return {generator for journal in self._journals for generator in journal.generators}

    @property
    def device(self) -> torch.device:
        """Where the step runs."""
        return self._backend.device

    @property
    def drew_last(self) -> bool:
        """Whether the last observed run did so."""
        return self._journals[-1].draws_from_default

    def made_last(self) -> set[int]:
        """Addresses of storages that the last observed run made and that Python still holds."""
        if self._journals[-1].kept():
            gc.collect()
        return self._journals[-1].kept()

    @property
    def obstacle(self) -> str | None:
        """Why no graph can do it, if an observed run used something that graphs do not know."""
        return next((journal.obstacle for journal in self._journals if journal.obstacle), None)

    def wrote(self, address: int) -> bool:
        """Whether an observed run wrote to the storage at this address."""
        return any(address in journal.written for journal in self._journals)

    @property
    def written(self) -> set[int]:
        """Addresses of the storages from before that observed runs wrote."""
        return set().union(*(journal.written for journal in self._journals))

    def run(self, step: Callable[[], Any], *, observed: bool = True, counting: bool = False) -> Any:
        """Run a step and undo it. The result stays valid unless it aliases restored state.

        `observed=False`: rely on what earlier runs wrote, which must have been of this size and on these
        inputs: others are written elsewhere. Compiled code steps aside while it is watched. `counting`: note
        how often each element is written.
        """
        with self.undone():
            return self.run_for_good(step, observed=observed, counting=counting)

    def run_for_good(self, step: Callable[[], Any], *, observed: bool = True, counting: bool = False) -> Any:
        """The same, not undone yet.

        Caches made under `inference_mode` refuse writes outside of it: such a step is tried once more,
        without the bookkeeping of views and versions that those lack.
        """
        if not self.writes_inference_tensors:
            try:
                return self._run(step, observed, counting)
            except RuntimeError as error:
                if "inference tensor" not in str(error):
                    raise
                self.undo()
                self.writes_inference_tensors = True
        with writing_inference_tensors():
            return self._run(step, observed, counting)

    def _run(self, step: Callable[[], Any], observed: bool, counting: bool) -> Any:
        if self._state is not None or not observed:
            self._rewinds = True
            return step()
        made = set().union(*(journal.survivors() for journal in self._journals))
        journal = WriteJournal(
            ignore=self._sinks.values(), counts_hits=counting, notes_lines=self._notes_lines
        )
        self._journals.append(journal)
        with journal:
            result = step()
        if made & journal.written:
            raise CaptureError(
                "the step created state in its first run and changed it in the second, as optimizers and "
                "caches do, and trial runs cannot tell how that state should start: run the step once before "
                "the capture"
            )
        return result

    def repeat_until_steady(self, step: Callable[[], Any]) -> None:
        """CaptureError if the last two observed runs did different work, and so do the next two: then Python
        state that the step changes decides what it does, and a graph would repeat one case for ever."""
        if len(self._journals) < 2 or self._difference() is None:
            return
        self._notes_lines = True
        self.run(step)
        difference = self._difference()
        if difference is not None:
            position, (first, given), (second, then_given) = difference
            lines = self._journals[-1].lines
            blame = lines[min(position, len(lines) - 1)] if lines else Blame(None)
            raise CaptureError(
                f"two trial runs on the same inputs did different work: {first} with {given}, then {second} "
                f"with {then_given}. A Python value that the step changes (a counter, a position, a random "
                f"number) decides what it does: keep it in a tensor",
                where=blame.line,
                inside=blame.inside,
            )

    def _difference(self) -> tuple[int, tuple[Any, str], tuple[Any, str]] | None:
        """The first call in which the last two observed runs differ: its position, and what each made."""
        before, after = (journal.work for journal in self._journals[-2:])
        missing = (None, "nothing")
        pairs = enumerate(zip_longest(before, after, fillvalue=missing))
        return next(((at, one, other) for at, (one, other) in pairs if one != other), None)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo in the end whatever this context does to known state."""
        try:
            yield
        finally:
            self.undo()

    def undo(self) -> None:
        """Put everything back."""
        with torch.no_grad(), writing_inference_tensors():
            for name, saved in self._saved.items():
                assert self._state is not None
                settled(self._state[name]).copy_(saved)
        for journal in reversed(self._journals):
            journal.undo()
        self._reset_rng()

    def changes(self) -> dict[str, Change]:
        """Declared state that differs from what it will be put back to."""
        found = {}
        for name, saved in self._saved.items():
            assert self._state is not None
            now = settled(self._state[name])
            if not torch.equal(now, saved):
                found[name] = Change(saved, now.clone())
        return found

    def _reset_rng(self) -> None:
        """Set the random generators back to where they were: only if the step draws, since other threads may
        draw from them meanwhile, and would draw the same numbers again."""
        for generator, state in self._generators:
            generator.set_state(state)
        if not (self._rewinds or self.draws_from_default):
            return
        if not torch.equal(torch.get_rng_state(), self._host_rng):
            torch.set_rng_state(self._host_rng)
        if not torch.equal(self._backend.rng_state(), self._rng):
            self._backend.set_rng_state(self._rng)
