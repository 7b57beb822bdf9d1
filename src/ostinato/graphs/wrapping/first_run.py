"""A function run once on real inputs, before anything is captured: what it does, and whether a graph can."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..backends import backend_for
from ..capturing.autocast import clean_autocast_cache
from ..capturing.trial import Trials
from ..dispatching.mode import GraphMode
from ..dispatching.step_mode import step_mode
from ..inputs.buffers import Batch
from ..memory import storage_address
from ..trees import map_tensors
from .reached import Assigned, Reached
from .signature import Signature


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
    ) -> None:
        """`may_stay`: whether this is a call, so that what cannot be undone may stand."""
        self._function, self._signature, self._batch = function, signature, batch
        self._roots = (function, *signature.functions)
        self._before = Reached(*self._roots)
        self._trials = Trials(backend_for(device), generators=generators)
        self.refusal: str | None = None
        """Why no graph can do what it does."""
        self.assigned: Assigned | None = None
        """Where it leaves tensors in every call, besides its result."""
        drawn = _python_generators()
        try:
            result, copies = self._run(self._trials)
            # A clone: so whatever of it is alive afterwards is state of the function's.
            self.result = map_tensors(torch.Tensor.clone, result)
            del result
            self.stays = may_stay and self._trials.makes_state
            if self._trials.unplain is not None:
                self.refusal = (
                    f"the step works with {self._trials.unplain} tensors: graphs know dense ones only"
                )
            elif drawn != _python_generators():
                self.refusal = (
                    "the step draws from Python's or NumPy's random generator, and a graph would repeat one "
                    "draw: draw with torch"
                )
            elif self._trials.makes_state or self._before.assigned():
                self._look_twice(Trials(backend_for(device)) if self.stays else self._trials)
        except BaseException:
            self.undo()
            raise
        self.written = tuple(n for n, copy in copies.items() if self._trials.wrote(storage_address(copy)))
        """Arguments that it changes in place."""
        self.writes_inference_tensors = self._trials.writes_inference_tensors
        if not self.stays:
            self.undo()

    def undo(self) -> None:
        """As if it had not run."""
        self._trials.undo()
        self._before.put_back()

    def _run(self, trials: Trials) -> tuple[Any, Batch]:
        copies = {name: tensor.detach().clone() for name, tensor in self._batch.items()}
        with step_mode(GraphMode.NONE), torch.no_grad(), clean_autocast_cache():
            return trials.run_for_good(lambda: self._signature.call(self._function, copies)), copies

    def _look_twice(self, trials: Trials) -> None:
        """State made in the first run is there in the second: what is assigned then is assigned always."""
        first = Reached(*self._roots)
        try:
            self._run(trials)
            assigned = first.assigned()
            carried_on = assigned.carried_on({storage_address(tensor) for tensor in trials.reads})
            if carried_on is None and trials.made_last() - assigned.storages():
                carried_on = "something that it reaches in a way of its own"
        finally:
            trials.undo()
            first.put_back()
        if carried_on is not None:
            self.refusal = (
                f"the step keeps state by assigning a new tensor to {carried_on}, and a replay goes on from "
                f"the old one: change it in place (copy_, index_copy_)"
            )
        elif assigned:
            self.assigned = assigned


def _python_generators() -> tuple[Any, ...]:
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2:]
