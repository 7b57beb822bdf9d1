"""Trial runs that leave no trace: warm-ups, and the runs that verification compares with."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..backends import Backend
from .journal import WriteJournal


class Trials:
    """Runs a step as often as needed; afterwards state, counters and random generators are as before.

    What a step changes is found by a journal. If the owner of the step has declared its state, that is saved
    instead and nothing is observed: needed for raw kernel launches, which the journal cannot see, and
    cheaper. What a step creates in its first run and keeps (lazy state) bears the trace of that one run.
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
        self._saved = {name: tensor.clone() for name, tensor in (state or {}).items()}
        self._sinks = dict(sinks or {})
        self._journals: list[WriteJournal] = []
        self._generators = [(generator, generator.get_state()) for generator in generators]
        self._rng = backend.rng_state()
        self._host_rng = torch.get_rng_state()

    def run(self, step: Callable[[], Any], *, observed: bool = True) -> Any:
        """Run a step and undo it. The result stays valid unless it aliases restored state.

        `observed=False`: rely on what earlier runs wrote; compiled code steps aside while it is watched.
        """
        with self.undone():
            if self._state is not None or not observed:
                return step()
            journal = WriteJournal(ignore=self._sinks.values())
            self._journals.append(journal)
            with journal:
                return step()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo in the end whatever this context does to known state; it starts from the saved generators."""
        self.reset_rng()
        try:
            yield
        finally:
            self.undo()

    def reset_rng(self) -> None:
        """Set the random generators back to where they were."""
        torch.set_rng_state(self._host_rng)
        self._backend.set_rng_state(self._rng)
        for generator, state in self._generators:
            generator.set_state(state)

    def undo(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for name, saved in self._saved.items():
                assert self._state is not None
                self._state[name].copy_(saved)
        for journal in reversed(self._journals):
            journal.undo()
        self.reset_rng()
