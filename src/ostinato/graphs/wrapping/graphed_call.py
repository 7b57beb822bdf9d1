"""Serves the calls of one function from graphs: captures at the first call, then decides for each call."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from ..capturing.autocast import clean_autocast_cache
from ..capturing.captured import CapturedGraph
from ..capturing.gate import turn
from ..capturing.pool import GraphPool
from ..checking.verify import Verification
from ..dispatching.descriptor import BatchDescriptor
from ..dispatching.dispatch import Decision, Dispatcher, Reason
from ..dispatching.keys import GraphKey
from ..dispatching.mode import GraphMode
from ..dispatching.step_mode import decided_step_mode, step_mode
from ..errors import BatchError, CaptureError, ConfigError, VerifyError
from ..inputs.buffers import Batch, InputBuffers
from ..journal import writing_inference_tensors
from ..memory import storage_address
from ..report import Report
from ..results import Results
from ..runner import CudaGraphRunner
from .doctor import Diagnosis, diagnose
from .entry import Entry, Settings
from .first_run import FirstRun, SameObjects
from .in_place import InPlace
from .no_gradients import Differentiable, places_with_gradients, require_gradients, without_gradients
from .reached import Reached
from .signature import EmptyBatchError, Examples, Rows, Signature, is_opaque
from .transforms import has_replaced_parameters, inside_transform, is_differentiated_by_torch

logger = logging.getLogger("ostinato.graphs")
is_grad_enabled = torch.is_grad_enabled

_MOST_EQUAL_CHANGES = 8
_WITH_GRADIENTS = (Reason.TRANSFORMED, Reason.WRITTEN_ARGUMENT)
"""Why calls run eagerly in all that concerns gradients, too."""


class Outcome(NamedTuple):
    """What a graph makes of a call, where that is more than a result."""

    result: Any
    left: list[Any]
    """What the function leaves in Python, see `Effects`."""
    written: dict[str, torch.Tensor]
    """The arguments that it writes in place, as it leaves them. They are here to be compared and checked."""


class GraphedCall:
    """Decides for each call whether a graph serves it. What `graphed` returns holds one of these."""

    def __init__(
        self, function: Callable[..., Any], settings: Settings, pool: GraphPool | None = None
    ) -> None:
        """`pool` is not part of the settings: copies have their own memory."""
        self.function = function
        self.settings = settings
        self._mode = settings.mode
        self._overwrites = settings.results is not Results.COPIED
        """Whether a call overwrites the results of another one."""
        self.eager_steps: Counter[Reason] = Counter()
        self.attributes_changed = False
        """Whether an attribute was set through the wrapper since the capture."""
        self.given_pool = self._pool = pool
        self._entries: list[Entry] = []
        self._shares_results = pool or self
        self.owner: threading.Thread | None = None
        """The owner of the guarded results that a call overwrites."""
        self._warned_of: set[str] = set()
        self.just_deleted: list[tuple[dict[str, Any], str, Any]] = []
        """The parameter or buffer last deleted through the wrapper, and its position."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Serve one call from a graph if the step's mode lets this wrapper act; capture at the first call."""
        return self.serve(args, kwargs)

    def serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call with these arguments."""
        decided, mode = decided_step_mode(), self._mode
        if decided is not None and decided is not mode:
            return self.function(*args, **kwargs)
        transformed = inside_transform() or (
            is_grad_enabled() and require_gradients(args, kwargs) and is_differentiated_by_torch()
        )
        if transformed or mode is GraphMode.NONE:
            reason = Reason.DISABLED if mode is GraphMode.NONE else Reason.TRANSFORMED
            return self._eagerly(reason, args, kwargs, with_gradients=transformed)
        owner = self._shares_results.owner
        if (owner is not None or self._overwrites) and owner is not threading.current_thread():
            self._take_over()
        with turn:
            why_not, result = self._serve(args, kwargs)
        if why_not is None:
            return result
        return self._eagerly(why_not, args, kwargs, with_gradients=why_not in _WITH_GRADIENTS)

    def _take_over(self) -> None:
        """Make the calling thread the owner of the results: two threads would overwrite each other's."""
        owner = self._shares_results.owner
        if owner is not None and owner.is_alive():
            raise BatchError(
                f"the guarded results of this wrapper, or of others on its pool, belong to thread "
                f"{owner.name}, and this call would overwrite them: use results='copied' for all wrappers on "
                f"the pool, or a separate wrapper and pool for each thread"
            )
        self._shares_results.owner = threading.current_thread() if self._overwrites else None

    def _serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Reason | None, Any]:
        """The result of a call, or why it must run eagerly."""
        try:
            found = self._find(args, kwargs)
            if found is None and self._entries:
                opaque = is_opaque(args, kwargs)
                reason = Reason.OPAQUE_ARGUMENT if opaque else Reason.UNSEEN_SIGNATURE
                if not opaque and reason not in self._warned_of:
                    self._warn_once(reason, self._unlike_captured(args, kwargs))
                return reason, None
            if found is None and has_replaced_parameters():
                return Reason.TRANSFORMED, None
            if found is None:
                signature, batch = self.signature_of(args, kwargs)
                if signature.opaque is not None:
                    self._warn_once(signature.opaque, signature.opaque)
                    return Reason.OPAQUE_ARGUMENT, None
                first = self._capture(signature, batch, may_stay=True)
                if first.stays:  # it cannot be undone: it was the call
                    self.eager_steps[Reason.FIRST_CALL] += 1
                    outcome = Outcome(first.result, first.effects.left_by_the_call(), {})
                    first.result = None  # the caller's alone
                    entry = self._entries[-1]
                    if is_grad_enabled():
                        refused = entry.differentiable.refused(batch, is_plain=False)
                        outcome = entry.differentiable.refusing(outcome, refused)
                    return None, _received(outcome, entry, batch, has_run=True)
                found = self._find(args, kwargs)
                assert found is not None
        except EmptyBatchError:
            return Reason.EMPTY_BATCH, None
        except BatchError:
            if self._entries and not self.graphs():
                return Reason.UNSEEN_SIGNATURE, None  # nothing is padded, so rows need not be told
            raise
        entry, batch, (shape, where) = found
        is_standing = entry.is_standing()
        why_not = self._why_not(entry, is_standing)
        if why_not is not None:
            self._warn_of(why_not, entry)
            return why_not, None
        runner = entry.runner
        ready = runner.prepared(shape)
        if isinstance(ready, Decision):
            return ready.reason, None
        if not ((is_standing or entry.reached.is_unchanged()) and runner.reads_hold()):
            if has_replaced_parameters():
                return Reason.TRANSFORMED, None
            self.check_addresses()
        if not is_standing and entry.num_equal_changes < _MOST_EQUAL_CHANGES:
            # Equal numbers, only other objects; or something was added that no code mentions.
            entry.num_equal_changes += 1
            entry.is_standing = entry.reached.standing(of_wrapper=True)
        if entry.in_place.counts and (clash := entry.in_place.why_not(batch)) is not None:
            self._warn_once(Reason.WRITTEN_ARGUMENT, clash)
            return Reason.WRITTEN_ARGUMENT, None
        is_plain = where is not None and where == entry.device
        refused = entry.differentiable.refused(batch, is_plain=is_plain) if is_grad_enabled() else None
        history = refused if refused is not None and refused.lasts and not self._overwrites else None
        if self._mode is GraphMode.FULL:
            outcome = runner.run_prepared(ready, batch, shape, is_plain=is_plain, history=history)
        else:
            with step_mode(GraphMode.NONE):  # eager calls between segments may hold wrappers of their own
                outcome = runner.run_prepared(ready, batch, shape, is_plain=is_plain, history=history)
        if refused is not history:
            outcome = entry.differentiable.refusing(outcome, refused)
        return None, _received(outcome, entry, batch)

    def capture(self, *args: Any, **kwargs: Any) -> Report:
        """Capture every rung for calls like this one; further signatures can be added the same way."""
        signature, batch = self.signature_of(args, kwargs)
        if signature.opaque is not None:
            raise BatchError(f"{signature.opaque}: pass tensors or numbers")
        with turn:
            self._capture(signature, batch)
        return self.report()

    def doctor(self, *args: Any, **kwargs: Any) -> Diagnosis:
        """Say what keeps a call like this one from graphs: every line and cause. Nothing of it stays."""
        return diagnose(GraphedCall(self.function, self.settings.for_trial()), args, kwargs)

    def recapture(self) -> Report:
        """Capture everything again, in the present state."""
        with turn:
            entries = list(self._entries)
            for entry in entries:
                entry.runner.drop()
            for entry in entries:
                self._capture(entry.signature, entry.batch)
        return self.report()

    def check_addresses(self) -> None:
        """Raise AddressError if something that graphs read has moved or was replaced since the capture."""
        for entry in self._entries:
            entry.reached.check()
            entry.runner.check_addresses()

    def report(self) -> Report:
        """What was captured and what it served."""
        if not self._entries:
            return Report.of_nothing(self.settings.mode, self.eager_steps)
        return Report.joined([entry.runner.report() for entry in self._entries])

    def verify(self, *, tolerance: float | None = None, seed: int = 0) -> Verification:
        """Compare every graph with the eager function, on new inputs made from the first call's."""
        if not self._entries:
            raise VerifyError("there is nothing to verify: no call has been captured yet")
        if not self.graphs():
            causes = dict.fromkeys(self.report().failures.values())
            raise VerifyError(
                "\n  ".join(["nothing was checked, because no graph could be captured:", *causes])
            )
        self.check_addresses()
        for entry in self._entries:
            if (reason := self._why_not(entry, entry.is_standing())) is not None:
                raise VerifyError(
                    f"something has changed since the capture ({reason}): set it back, or call recapture()"
                )
        before = [Reached(self.function, *entry.signature.functions, ran=()) for entry in self._entries]
        try:
            with step_mode(GraphMode.NONE):  # wrappers inside this one are part of its graph
                runners = [entry.runner for entry in self._entries if entry.runner.graphs]
                outcomes = [runner.verify(tolerance=tolerance, seed=seed) for runner in runners]
        finally:
            for entry, state in zip(self._entries, before, strict=True):
                state.put_back(entry.first.changes | entry.first.effects.places())
        return Verification(
            tuple(check for outcome in outcomes for check in outcome.checks),
            tuple(note for outcome in outcomes for note in outcome.notes),
        )

    def measured(self) -> list[str]:
        """The names of numbers that the function leaves in Python and replays leave alone."""
        return [name for entry in self._entries for name in entry.first.effects.measured]

    def graphs(self) -> list[CapturedGraph]:
        """All captured graphs."""
        return [graph for entry in self._entries for graph in entry.runner.graphs.values()]

    def signature_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Signature, Batch]:
        """The signature of a call, and its tensors; none if the signature is opaque."""
        settings = self.settings
        signature = Signature.of(
            self.function,
            args,
            kwargs,
            batch_dim=settings.batch_dim,
            shared=settings.shared,
            pads=settings.pads,
        )
        if signature.opaque is not None:
            return signature, {}
        found = signature.batch_of(args, kwargs)
        if found is None:
            raise BatchError("the shapes of the arguments do not fit together")
        return signature, found[0]

    def device_of(self, batch: Batch) -> torch.device:
        """Where graphs for a call with these tensors run."""
        if self._pool is not None:
            return self._pool.device
        devices = [tensor.device for tensor in batch.values()]
        if isinstance(self.function, torch.nn.Module):
            devices += [parameter.device for parameter in self.function.parameters()]
        return next((device for device in devices if device.type != "cpu"), devices[0])

    # -- internals ---------------------------------------------------------------------------------

    def _warn_once(self, about: str, text: str) -> None:
        if about not in self._warned_of:
            self._warned_of.add(about)
            logger.warning("calls run eagerly: %s", text)

    def _warn_of_measured(self, names: Sequence[str]) -> None:
        if "measured" not in self._warned_of:
            self._warned_of.add("measured")
            logger.warning(
                "replays run no Python and leave %s%s as it is, a number that is another one in every call, "
                "whatever the arguments: take it around the calls",
                ", ".join(names[:3]),
                " and others" if len(names) > 3 else "",
            )

    def _unlike_captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        try:
            signature, _ = self.signature_of(args, kwargs)
        except (BatchError, ConfigError) as error:
            return str(error)
        what = self._entries[-1].signature.difference(signature)
        return f"{what}; call capture() with such arguments to serve them from graphs as well"

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Entry, Batch, Rows] | None:
        for entry in self._entries:
            matched = entry.signature.given_by(args, kwargs)
            if matched is not None:
                return entry, *matched
        return None

    def _why_not(self, entry: Entry, is_standing: bool) -> Reason | None:
        """Why the present state rules out the graphs of a call's signature; None if it does not."""
        if _autocast(entry.device) != entry.surroundings[0]:
            return Reason.AUTOCAST_CHANGED
        if is_standing and not self.attributes_changed:
            return None
        if not entry.runner.graphs:  # there is a reason for that already
            return None
        if entry.reached.training() != entry.surroundings[1]:
            return Reason.TRAINING_MODE_CHANGED
        if self.attributes_changed or not entry.reached.is_same_code():
            return Reason.ATTRIBUTE_CHANGED
        # Where a tensor was replaced, too, that is an error, whatever else has changed with it.
        has_changed = bool(_others(entry.reached)) and entry.reached.is_unchanged()
        return Reason.ATTRIBUTE_CHANGED if has_changed else None

    def _warn_of(self, reason: Reason, entry: Entry) -> None:
        names = _others(entry.reached) if reason is Reason.ATTRIBUTE_CHANGED else []
        which = f": {', '.join(names[:5])}" if names else ""
        self._warn_once(reason, f"{reason} since the capture{which}: set it back, or call recapture()")

    def _eagerly(
        self, reason: Reason, args: tuple[Any, ...], kwargs: dict[str, Any], *, with_gradients: bool
    ) -> Any:
        self.eager_steps[reason] += 1
        below = GraphMode.PIECEWISE if self.settings.mode is GraphMode.FULL else GraphMode.NONE
        with ExitStack() as modes:
            modes.enter_context(step_mode(below))
            if any(entry.first.writes_inference_tensors for entry in self._entries):
                modes.enter_context(writing_inference_tensors())
            result = self.function(*args, **kwargs)
        return result if with_gradients else without_gradients(result)

    def _capture(self, signature: Signature, batch: Batch, *, may_stay: bool = False) -> FirstRun:
        device, options = self.device_of(batch), self.settings.options
        first = FirstRun(
            self.function,
            signature,
            batch,
            device,
            options.generators,
            may_stay=may_stay,
            piecewise=self.settings.mode is GraphMode.PIECEWISE,
        )
        if self._overwrites:  # results are guarded: each is an object of its own
            first.same = SameObjects([], {}, [])
        self._entries = [entry for entry in self._entries if not entry.signature.same_as(signature)]
        before = Reached(self.function, *signature.functions, ran=())
        if self._pool is None:
            self._pool = GraphPool(device)
        with torch.inference_mode(False), torch.no_grad():
            runner = self._runner(self._pool, signature, batch, first)
        try:
            if first.refusal is None:
                runner.capture()
                self._refuse_what_sizes_decide(runner, before, first)
            elif options.strict:
                raise CaptureError(first.refusal)
            else:
                runner.refuse(first.refusal)
        finally:
            changed = before.changed()
            before.put_back(first.changes | first.effects.places() if runner.graphs else changed)
        reached = Reached(
            self.function,
            *signature.functions,
            reads=first.reads | runner.storages_read(),
            ignored=first.changes | first.effects.places(),
            growing=first.grown | {holder for holder, _ in changed},
            ran=first.ran.codes,
            environment=first.ran.environment,
        )
        if runner.graphs and (why := reached.why_closed()) is not None:
            runner.give_up(f"CaptureError: {why}")  # of an installed package's code, which had to run first
        if first.effects.measured and runner.graphs:
            self._warn_of_measured(first.effects.measured)
        runner.ignore_reads(reached.tensors)
        kept = {name: tensor.detach().clone() for name, tensor in batch.items()}
        surroundings = _autocast(runner.pool.device), reached.training()
        standing = reached.standing(of_wrapper=True)
        used = {storage_address(tensor) for tensor in reached.tensors} | runner.storages_read()
        in_place = InPlace(first.written, first.written_elsewhere, used)
        if runner.graphs:
            in_place.tell(batch)
        look = partial(self._places_with_gradients, runner, signature, kept)
        differentiable = Differentiable(reached.tensors, look)
        self._entries.append(
            Entry(
                *(signature, runner, kept, first, in_place, differentiable, reached, surroundings),
                *(runner.pool.device, standing),
            )
        )
        self.attributes_changed = False
        return first

    def _places_with_gradients(
        self, runner: CudaGraphRunner, signature: Signature, batch: Batch, wanted: Sequence[bool]
    ) -> Collection[int] | None:
        """Run the function once, on the fewest rows, with arguments that require gradients or do not. Returns
        which results have some then; None if it has no graph, or does not work with gradients."""
        if not runner.graphs:
            return None
        fewest = min(graph.descriptor for graph in runner.graphs.values())
        inputs = {name: value.clone() for name, value in Examples(signature, batch).dummy(fewest).items()}
        for value, is_wanted in zip(inputs.values(), wanted, strict=True):
            value.requires_grad_(is_wanted)
        before, trials = Reached(self.function, *signature.functions, ran=()), runner.trials()
        with turn, step_mode(GraphMode.NONE), torch.inference_mode(False), torch.enable_grad():
            try:
                with clean_autocast_cache():
                    return places_with_gradients(trials.run(lambda: runner.step(**inputs)))
            except Exception:
                return None
            finally:
                before.put_back(before.changed())

    def _refuse_what_sizes_decide(self, runner: CudaGraphRunner, before: Reached, first: FirstRun) -> None:
        """Drop all graphs if trial runs of several sizes showed a problem that the first run did not."""
        effects, ran = first.effects, first.ran.codes
        elsewhere = before.left_elsewhere(ran, effects)
        cause = None
        if self.settings.compile_up_to and not effects.only_assigns:
            cause = "the step counts or appends in Python, which compile_up_to= does not see: leave it out"
        if not runner.reads_hold():
            cause = "the step replaces a tensor that it reads for every size: keep one tensor per size"
        elif elsewhere is not None:
            effects.refuse(elsewhere, f"assigns {elsewhere} only at some sizes")
        cause = cause or effects.refusal or effects.varies
        if cause is not None and runner.graphs:
            if self.settings.options.strict:
                raise CaptureError(cause)
            runner.give_up(f"CaptureError: {cause}")

    def _runner(
        self, pool: GraphPool, signature: Signature, batch: Batch, first: FirstRun
    ) -> CudaGraphRunner:
        settings, function, examples = self.settings, self.function, Examples(signature, batch)
        effects, written = first.effects, first.written

        def step(**inputs: torch.Tensor) -> Any:
            if torch.compiler.is_compiling():  # not to be traced through what takes notes
                result = signature.call(function, inputs)
                left = effects.left_by_the_call()
            else:
                # Of code that ran in watched runs alone: compiled code is not to run beside it.
                is_watched = torch._C._len_torch_dispatch_stack() > 0
                with first.ran.noted() if is_watched else nullcontext(), effects.noted() as left:
                    result = signature.call(function, inputs)
                if first.same:
                    first.same.narrow_down(result, inputs)
            if not (effects or written):
                return result
            return Outcome(result, left, {name: inputs[name] for name in written})

        is_full, limit = settings.mode is GraphMode.FULL, settings.ladder.limit
        describe = BatchDescriptor.decode if is_full else lambda size: BatchDescriptor(size, size)
        runner = CudaGraphRunner(
            step,
            InputBuffers(
                signature.tensor_fields, max_tokens=limit, device=pool.device, allocate=pool.allocate
            ),
            [GraphKey(settings.mode, describe(size)) for size in settings.ladder],
            dispatcher=Dispatcher(settings.mode),
            pool=pool,
            options=settings.options,
            dummy=examples.dummy,
            make_batch=examples.drawn(pool.device),
            output_dim=settings.batch_dim if isinstance(settings.batch_dim, int) else 0,
            rows_are_independent=False,
            compile_up_to=settings.compile_up_to,
            results=settings.results,
            written=first.written,
            debug=settings.debug,
        )
        runner.eager_steps = self.eager_steps
        return runner


def _received(outcome: Any, entry: Entry, batch: Batch, *, has_run: bool = False) -> Any:
    """The result of a call, once what else came of it is in its places. `has_run`: the function has run, and
    left that itself."""
    result = outcome
    if isinstance(outcome, Outcome):
        effects, result = entry.first.effects, outcome.result
        (effects.exchange if has_run else effects.leave)(outcome.left)
    same = entry.first.same
    return same.restored(result, batch) if same else result


def _others(reached: Reached) -> list[str]:
    """The names of values that have changed or are new."""
    return [*reached.changed_values(), *reached.added()]


def _autocast(device: torch.device) -> Any:
    """The type that autocast computes in, or False."""
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
