"""The graphs of a step: captured within a budget, agreed on between ranks, dropped, recorded again."""

import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from .backends import Backend
from .blame import blamed, frames_of
from .capturing.budget import Weight, affordable, predicted_growth
from .capturing.captured import CapturedGraph, UnnamedCallError
from .capturing.gate import capture_gate, frozen_gc, require_open_gate, turn
from .capturing.pool import GraphPool
from .capturing.progress import CaptureProgress
from .capturing.recorder import Step, StepRecorder
from .capturing.trial import Trials
from .checking.addresses import AddressBook
from .checking.batch_dependence import refuse_dependence_on_the_batch
from .checking.obstacles import ObstacleWatch
from .dispatching.descriptor import BatchDescriptor
from .dispatching.dispatch import Dispatcher, Reason
from .dispatching.keys import GraphKey, capture_order
from .dispatching.mode import GraphMode
from .errors import CaptureError, ConfigError, OstinatoError
from .forbidden import Forbidden
from .inputs.buffers import Batch, InputBuffers
from .options import CaptureOptions
from .report import describe, without_numbers
from .trimming import Trimmer

logger = logging.getLogger("ostinato.graphs")

Standing = tuple[dict[GraphKey, tuple[int, int]], dict[GraphKey, tuple[int, int]]]
"""Graphs that were taken down, in service and new, each with its replays and their real tokens."""


class GraphSet:
    """The graphs of one step, as many as could be captured. `CudaGraphRunner` also runs batches from them."""

    def __init__(
        self,
        step: Step,
        buffers: InputBuffers,
        keys: Sequence[GraphKey],
        *,
        dispatcher: Dispatcher | None,
        pool: GraphPool | None,
        options: CaptureOptions | None,
        state: Mapping[str, torch.Tensor] | None,
        sinks: Mapping[str, torch.Tensor] | None,
        dummy: Callable[[BatchDescriptor], Batch] | None,
        record_dummy: Callable[[BatchDescriptor], Batch] | None,
        output_dim: int,
        rows_per_request: int,
        rows_are_independent: bool,
        agree: Callable[[Collection[GraphKey]], Collection[GraphKey]] | None,
        compile_up_to: int,
        kernels_of: Callable[[GraphKey], Hashable] | None,
        warmups_give_back: bool,
    ) -> None:
        """See `CudaGraphRunner`."""
        self.step = step
        self.buffers = buffers
        self.keys = tuple(sorted(set(keys), key=capture_order))
        self.dispatcher = dispatcher or Dispatcher(GraphMode.FULL)
        self.pool = pool or GraphPool(buffers.device)
        self.options = options or CaptureOptions()
        self.graphs: dict[GraphKey, CapturedGraph] = {}
        self._new: dict[GraphKey, CapturedGraph] = {}
        """Graphs of a capture that is still running."""
        self.predicted: dict[GraphKey, int] = {}
        """By how many bytes each graph was expected to make the pool grow, if it was weighed."""
        self.failures: dict[GraphKey, str] = {}
        """Rungs that could not be captured, with the cause."""
        self._untold: list[tuple[GraphKey, Reason]] = []
        """Of those, what has not been logged yet."""
        self.sinks = dict(sinks or {})
        self._recorder = StepRecorder(
            step,
            buffers,
            self.pool,
            self.options,
            state=state,
            sinks=self.sinks,
            dummy=dummy,
            record_dummy=record_dummy,
            compile_up_to=compile_up_to,
            kernels_of=kernels_of,
            warmups_give_back=warmups_give_back,
        )
        self._addresses = AddressBook()
        """What the graphs read besides their inputs."""
        self._dummy, self._agree = dummy, agree
        self.rows_are_independent = rows_are_independent
        self._output_rows = (output_dim, rows_per_request)
        self.outputs = self._new_trimmer()
        """Which rows of the outputs are real."""
        self._check_keys(self.keys)
        if self.pool.device != buffers.device:
            raise ConfigError(f"the pool is on {self.pool.device}, but the buffers are on {buffers.device}")

    @property
    def backend(self) -> Backend:
        """What captures and replays on this device."""
        return self.pool.backend

    def _capture_missing(self, keys: Iterable[GraphKey] | None, progress: bool | None) -> None:
        """Capture every key, or each of these, that has no graph yet, largest first."""
        if keys is not None:
            keys = tuple(keys)
            self._check_keys(keys)
            self.keys = tuple(sorted({*self.keys, *keys}, key=capture_order))
        if self.graphs:
            self._addresses.check()  # more graphs must not make moved weights look right
        missing = [key for key in self.keys if key not in self.graphs and (keys is None or key in keys)]
        with turn, self.buffers.kept():
            self._capture(missing, progress)

    def _capture(self, missing: Sequence[GraphKey], progress: bool | None) -> None:
        before = self.pool.bytes
        outputs, self.outputs = self.outputs, self.outputs.copy()
        is_captured = False
        self.pool.join(self)
        for key in missing:
            self.failures.pop(key, None)
        try:
            with (
                self._telling(),
                capture_gate(),
                frozen_gc(self.options.freeze_gc),
                CaptureProgress(missing, progress) as bar,
            ):
                logger.info("capturing %d graphs on %s", len(missing), self.pool.device)
                kept = self._within_budget(missing, bar)
                self._recorder.warm_up(kept)
                for key in kept:
                    bar.start(key)
                    self._capture_or_explain(key, self._new)
                    bar.done(self.pool.bytes)
                new = list(self._new)
                self.graphs |= self._new
                self._new.clear()
                self._settle_outputs(new)
            is_captured = True
            with self._telling():
                new = self._agreed_on([key for key in new if key in self.graphs])
        except BaseException:
            self._new.clear()
            self._forget(missing)
            self.outputs = outputs
            if self._agree is not None and not is_captured:
                self._agree(())
            raise
        for key in new:
            self.dispatcher.add(key)
        self._addresses.renew()
        self._addresses.note_reads(self._recorder.take_reads())
        logger.info(
            "captured %d graphs, %d failed or dropped, %.2f s, %d bytes",
            len(new),
            len(missing) - len(new),
            bar.seconds,
            self.pool.bytes - before,
        )

    def _within_budget(self, missing: Sequence[GraphKey], bar: CaptureProgress) -> Sequence[GraphKey]:
        """The keys that fit into the pool's budget, in the order that takes the least memory; the others are
        dropped. A key that cannot be weighed is kept: capturing it shows why."""
        budget = self.pool.budget
        if budget is None:
            return missing
        weights: dict[GraphKey, Weight] = {}
        for key in missing:
            bar.start(key)
            with suppress(Exception):
                weights[key] = self._recorder.weigh(key, among=self.keys)
        beside = self.pool.bytes_beside
        held = self.pool.bytes - beside
        kept = affordable(weights, budget - beside, held, self.keys)
        self.predicted |= predicted_growth(kept, weights, held)
        for key in [key for key in weights if key not in kept]:
            takes = f"it takes {weights[key].total:,} bytes"
            told = f"{takes} and does not fit into the budget of {budget:,} bytes"
            self._give_up(key, Reason.OUT_OF_MEMORY, told)
            bar.done(self.pool.bytes)
        return [*(key for key in missing if key not in weights), *kept]

    def take_down(self) -> Standing:
        """Drop all graphs until `put_up`, together with their memory in the pool."""
        self._graphs_changed()
        counted = [{key: _count(of[key]) for key in of} for of in (self.graphs, self._new)]
        self.graphs.clear()
        self._new.clear()
        self._recorder.bridges.drop()
        return counted[0], counted[1]

    def put_up(self, standing: Standing) -> None:
        """Record them again; only inside `capture_gate()`. Their counters continue."""
        with self._telling(), self.buffers.kept():
            for counts, captured in zip(standing, (self.graphs, self._new), strict=True):
                for key, (replays, real_tokens) in counts.items():
                    self._capture_or_explain(key, captured)
                    if key in captured:
                        captured[key].replays, captured[key].real_tokens = replays, real_tokens
        self._addresses.note_reads(self._recorder.take_reads())

    def capture_one(self, key: GraphKey) -> CapturedGraph:
        """Capture one graph; only inside `capture_gate()`."""
        require_open_gate()
        try:
            return self._recorder.capture(key, among=self.keys)
        except UnnamedCallError as error:
            raise self._named(error, key) from error

    def _named(self, error: UnnamedCallError, key: GraphKey) -> CaptureError:
        """The same error with the call that a capture on the device does not name: one run more, watched,
        shows it."""
        watch = ObstacleWatch(piecewise=key.mode is GraphMode.PIECEWISE)
        with suppress(Exception):
            self._recorder.run_within(watch, key.descriptor)
        there = [each for each in watch.obstacles if each.where == error.where]
        there.sort(key=lambda each: each.inside != error.inside)
        if not there:
            return CaptureError(error.message, where=error.where, inside=error.inside)
        found = Forbidden(there[0].what, there[0].why)
        return CaptureError(str(found), where=error.where, inside=error.inside)

    def try_out(self, key: GraphKey) -> None:
        """Run the step of a key once, on padding, and undo its effects."""
        self._recorder.try_out(key)

    def take_as_warm(self, kernels: Iterable[Hashable]) -> None:
        """What steps make when they first run these kernels, as `kernels_of` tells them apart, is there:
        captures run no warm-up for them. One that meets a cold kernel nevertheless begins anew, with them."""
        self._recorder.take_as_warm(kernels)

    def drop(self, key: GraphKey | None = None) -> None:
        """Drop one graph, or all of them. Dropping the last one frees the memory at once."""
        if key is not None and key not in self.graphs:
            raise ConfigError(f"there is no {key.mode} graph for {key.descriptor} to drop")
        dropped = list(self.graphs) if key is None else [key]
        for gone in dropped:
            self.dispatcher.mark_failed(gone, Reason.NOT_CAPTURED)
        with turn:
            self._forget(dropped)
        if key is None:
            self.pool.causes_told.clear()

    def give_up(self, cause: str) -> None:
        """Drop all graphs because none of them can be correct."""
        with self._telling():
            for key in list(self.graphs):
                self._forget([key])
                self._give_up(key, Reason.CAPTURE_FAILED, cause)

    def refuse(self, cause: str) -> None:
        """Capture nothing, record the cause, and run all steps eagerly."""
        with self._telling():
            for key in self.keys:
                self._give_up(key, Reason.CAPTURE_FAILED, cause)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """A context after which each cause for which graphs were given up is logged, once for all sizes. If
        other kinds of calls failed for the same cause, it is not repeated."""
        try:
            yield
        finally:
            causes: dict[tuple[GraphMode, Reason, str], list[GraphKey]] = {}
            for key, reason in self._untold:
                causes.setdefault((key.mode, reason, without_numbers(self.failures[key])), []).append(key)
            self._untold.clear()
            for (mode, reason, cause), keys in causes.items():
                if reason is Reason.CAPTURE_FAILED and (mode, cause) in self.pool.causes_told:
                    continue
                self.pool.causes_told.add((mode, cause))
                sizes = ", ".join(str(key.descriptor) for key in keys)
                logger.warning("no %s graph for %s (%s): %s", mode, sizes, reason, self.failures[keys[0]])

    def _graphs_changed(self) -> None:
        """What was known of them, and of the batch that the buffers hold, holds no more."""
        self.buffers.holds = None

    def _check_keys(self, keys: Iterable[GraphKey]) -> None:
        for key in keys:
            self.dispatcher.check(key)
            descriptor, buffers = key.descriptor, self.buffers
            if descriptor.num_tokens > buffers.max_tokens or descriptor.num_reqs > buffers.max_reqs:
                raise ConfigError(
                    f"a graph for {descriptor} does not fit into buffers for {buffers.max_tokens} tokens, "
                    f"{buffers.max_reqs} requests"
                )

    def _forget(self, keys: Iterable[GraphKey]) -> None:
        """Drop graphs and everything that refers to them."""
        self._graphs_changed()
        for key in keys:
            graph = self.graphs.pop(key, None)
            if graph is not None:
                self.pool.graphs.discard(graph)
        if not self.graphs:
            self.outputs = self._new_trimmer()
            self._addresses.forget_reads()
            self._recorder.bridges.drop()
        self.pool.overwrite()  # outputs of a dropped graph lie in memory that may go
        self.pool.shrink_if_unused()

    def _capture_or_explain(self, key: GraphKey, captured: dict[GraphKey, CapturedGraph]) -> None:
        bytes_before = self.pool.bytes
        failure = self._try_to_capture(key, captured)
        if failure is None:
            return
        # Only here, when nothing of the failed attempt is referred to any more, can its memory go.
        self._give_up(key, *failure)
        if failure[0] is Reason.OUT_OF_MEMORY and self.pool.bytes > bytes_before:
            self.pool.capture_anew()

    def _give_up(self, key: GraphKey, reason: Reason, cause: str) -> None:
        self.failures[key] = cause
        self.dispatcher.mark_failed(key, reason)
        self._untold.append((key, reason))
        self.pool.shrink_if_unused()
        self.backend.release_unused()

    def _try_to_capture(
        self, key: GraphKey, captured: dict[GraphKey, CapturedGraph]
    ) -> tuple[Reason, str] | None:
        bytes_before = self.pool.bytes
        try:
            # In no variable: frames may outlive a call, and must not hold a graph.
            captured[key] = self.capture_one(key)
            self.outputs.observe(key.descriptor, captured[key].recorded.output)
        except torch.OutOfMemoryError as error:
            return Reason.OUT_OF_MEMORY, f"{type(error).__name__}: {error}"
        except Exception as error:
            if self.options.strict:
                raise
            return Reason.CAPTURE_FAILED, _told(error, key)
        if self.pool.over_budget and self.pool.bytes > bytes_before:
            held, budget = self.pool.bytes, self.pool.budget
            del captured[key]
            return Reason.OUT_OF_MEMORY, f"the pool would hold {held:,} bytes, but its budget is {budget:,}"
        self.pool.graphs.add(captured[key])
        if self.options.debug_log:
            logger.info("captured %s", describe(captured[key]))
        return None

    def _settle_outputs(self, new: Sequence[GraphKey]) -> None:
        """Find out for every output which rows are real; if that fails, serve nothing from graphs."""
        works = self._recorder.take_works()
        descriptors = [key.descriptor for key in self.graphs]
        decode_only = all(descriptor.query_len == 1 for descriptor in descriptors)
        is_cut = self.dispatcher.pads  # else every batch has the size of its graph
        if is_cut and descriptors and self.outputs.in_doubt(tokens_are_requests=decode_only):
            self._probe_outputs(max(descriptors))
        try:
            if is_cut:
                self.outputs.check()
            if new and not self.rows_are_independent and self._dummy is not None:
                refuse_dependence_on_the_batch(self, self._dummy, works)
        except CaptureError as error:
            if self.options.strict:
                raise
            self.give_up(f"{type(error).__name__}: {error}")

    def _new_trimmer(self) -> Trimmer:
        is_compared = not self.rows_are_independent and self._dummy is not None
        return Trimmer(*self._output_rows, several_each=is_compared)

    def _agreed_on(self, new: list[GraphKey]) -> list[GraphKey]:
        if self._agree is None:
            return new
        agreed = set(self._agree(tuple(new)))
        for key in new:
            if key not in agreed:
                self._forget([key])
                self._give_up(key, Reason.OTHER_RANK, "another rank could not capture it")
        return [key for key in new if key in agreed]

    def _probe_outputs(self, largest: BatchDescriptor) -> None:
        """One eager trial with numbers of tokens and requests that no rung has.

        A step that is made for one size only fails here, and the most likely interpretation stands.
        """
        reqs = max(1, largest.num_reqs - (1 if largest.is_uniform else 2))
        tokens = reqs * largest.query_len if largest.query_len else max(reqs, largest.num_tokens - 1)
        try:
            probe = replace(largest, num_tokens=tokens, num_reqs=reqs)
            output = self._recorder.output_at(probe)
        except Exception as error:
            logger.debug("outputs could not be probed with %d requests: %s", reqs, error)
        else:
            self.outputs.observe(probe, output)

    # -- trying them -------------------------------------------------------------------------------

    def trials(self) -> Trials:
        """A way to run the step whose effects are undone."""
        return self._recorder.trials()

    def arguments(self, inputs: Mapping[str, torch.Tensor], descriptor: BatchDescriptor) -> dict[str, Any]:
        """The step's arguments: its inputs, and the descriptor if it has a parameter for it."""
        return self._recorder.arguments(inputs, descriptor)

    def launch(self, graph: CapturedGraph) -> None:
        """Replay a graph on what the buffers hold."""
        with turn:
            self.backend.order_replays()
            self.pool.overwrite()
            graph.replay()

    def poison_surroundings(self) -> None:
        """Fill what a replay must not depend on: dead outputs with NaN, the sinks with large numbers."""
        for graph in self.pool.graphs:
            for leaf in graph.leaves:
                if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and self._is_pooled(leaf):
                    leaf.fill_(float("nan"))
        for sink in self.sinks.values():
            if sink.is_floating_point():
                sink.fill_(min(3.0e4, torch.finfo(sink.dtype).max / 2))

    def _is_pooled(self, tensor: torch.Tensor) -> bool:
        return self.pool.memory.contains(tensor.data_ptr())


def _told(error: Exception, key: GraphKey) -> str:
    """Why a graph could not be captured."""
    told = f"{type(error).__name__}: {error}"
    blame = blamed(frames_of(error.__traceback__))
    if isinstance(error, OstinatoError) or blame.line is None:
        return told
    return (
        f"{told} (at {blame}). A step must run at every capture size, here {key.descriptor}: a tensor that "
        f"has one row for each of the batch must be an argument, or be made from one inside the step"
    )


def _count(graph: CapturedGraph) -> tuple[int, int]:
    return graph.replays, graph.real_tokens
