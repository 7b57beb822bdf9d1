"""A function run once on real inputs, before anything is captured: what it does, and whether a graph can."""

from collections.abc import Callable
from typing import Any

import torch

from ..backends import backend_for
from ..capturing import python_draws
from ..capturing.autocast import clean_autocast_cache
from ..capturing.trial import Trials
from ..dispatching.mode import GraphMode
from ..dispatching.step_mode import step_mode
from ..errors import OstinatoError
from ..inputs.buffers import Batch
from ..memory import storage_address
from ..trees import map_tensors
from .assigned import Assigned
from .code_names import Ran
from .holders import Key
from .reached import Reached
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
        self.refusal: str | None = None
        """Why no graph can do what it does."""
        self.assigned: Assigned | None = None
        """Where it leaves tensors in every call, besides its result."""
        self.changes: set[Key] = set()
        """What it assigns in every call."""
        self.grown: set[int] = set()
        """Holders, by identity, that it assigned in or added to, be it in this run alone."""
        self.reads: set[int] = set()
        """Addresses of the storages that it used."""
        self.ran = Ran()
        """The code that ran."""
        backend, ran = backend_for(device), self.ran
        trials = Trials(backend, generators=generators)
        before = Reached(function, *signature.functions, ran=())
        drawn = python_draws.generators()
        changed = None
        try:
            try:
                result, copies = _run(function, signature, batch, trials, ran)
            except Exception as error:
                if not may_stay or isinstance(error, OstinatoError):
                    raise
                trials.undo()
                before.put_back(before.changed())
                # Whoever raises without being watched, too, raises that.
                result, copies = _run(function, signature, batch, trials, ran, observed=False)
                told = f"{type(error).__name__}: {error}"
                self.refusal = f"the step works, but fails when observed, which a capture requires: {told}"
            # A clone: so whatever of it is alive afterwards is state of the function's.
            self.result: Any = map_tensors(torch.Tensor.clone, result)
            del result
            changed = before.changed()
            self.grown = {holder for holder, _ in changed}
            self.stays = self.refusal is not None or (may_stay and trials.makes_state)
            self.written = tuple(n for n, copy in copies.items() if trials.wrote(storage_address(copy)))
            """Arguments that it changes in place."""
            own = {storage_address(copy) for copy in copies.values()}
            self.reads = {storage_address(tensor) for tensor in trials.reads} - own
            is_known = self.refusal is None
            if trials.obstacle is not None:
                self.refusal = trials.obstacle
            elif drawn != python_draws.generators():
                self.refusal = self.refusal or python_draws.WHY_NOT
            if is_known and (changed or trials.makes_state or trials.draws_random):
                second = Trials(backend) if self.stays else trials
                self._look_twice(function, signature, batch, trials, second)
        except BaseException:
            trials.undo()
            before.put_back(self.changes or changed or before.changed())
            raise
        self.writes_inference_tensors = trials.writes_inference_tensors
        if not self.stays:
            trials.undo()
            before.put_back(self.changes)

    def _look_twice(
        self, function: Callable[..., Any], signature: Signature, batch: Batch, first: Trials, second: Trials
    ) -> None:
        """What was made in the first run is there in the second: what is assigned then is assigned always."""
        before = Reached(function, *signature.functions, ran=())
        ended, generators = torch.get_rng_state(), first.generators
        draws = first.draws_from_default
        try:
            if draws:
                torch.rand(
                    1, device="cpu"
                )  # begin elsewhere: a step that ends in the same place anyway has seeded
            _run(function, signature, batch, second, self.ran)
            self.changes, assigned = before.changed(), before.assigned()
            carried_on = assigned.carried_on({storage_address(tensor) for tensor in second.reads})
            if carried_on is None and second.made_last() - assigned.storages():
                carried_on = "a place that could not be found"
            own_generator = first.draws_random and not (second.generators <= generators)
            seeds = draws and second.drew_last and torch.equal(torch.get_rng_state(), ended)
        finally:
            if draws:
                torch.set_rng_state(ended)
            second.undo()
            before.put_back(before.changed())
        if self.refusal is not None:
            return
        if carried_on is not None:
            self.refusal = (
                f"the step keeps state by assigning a new tensor to {carried_on}, but replays use the old "
                f"tensor: change it in place (copy_, index_copy_)"
            )
        elif own_generator or (seeds and second.device.type == "cpu"):
            self.refusal = (
                "the step seeds its random numbers itself, and a replay would continue the sequence instead: "
                "create the numbers, or the generator, outside of the step"
            )
        elif assigned:
            self.assigned = assigned.without_former()


def _run(
    function: Callable[..., Any],
    signature: Signature,
    batch: Batch,
    trials: Trials,
    ran: Ran,
    *,
    observed: bool = True,
) -> tuple[Any, dict[str, torch.Tensor]]:
    copies = {name: tensor.detach().clone() for name, tensor in batch.items()}
    with step_mode(GraphMode.NONE), torch.no_grad(), clean_autocast_cache(), ran.noted():
        step = lambda: signature.call(function, copies)  # noqa: E731
        return trials.run_for_good(step, observed=observed), copies
