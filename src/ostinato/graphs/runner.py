"""Captures a step at every rung, then runs each batch from the graph that fits, or eagerly with a reason."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from .backends import Backend
from .capturing.budget import Weight, affordable, padding_saved, predicted_growth
from .capturing.captured import CapturedGraph
from .capturing.gate import capture_gate, frozen_gc, require_open_gate, turn
from .capturing.pool import GraphPool
from .capturing.progress import CaptureProgress
from .capturing.recorder import Step, StepRecorder
from .capturing.trial import Trials
from .checking.addresses import AddressBook, Watched
from .checking.batch_dependence import refuse_dependence_on_the_batch
from .checking.stale import guarded
from .checking.verify import MakeBatch, Verification, verify
from .dispatching.descriptor import BatchDescriptor, BatchShape
from .dispatching.dispatch import Decision, Dispatcher, Reason
from .dispatching.keys import GraphKey, capture_order
from .dispatching.mode import GraphMode
from .errors import AddressError, BatchError, CaptureError, ConfigError
from .inputs.buffers import Batch, FillPlan, InputBuffers
from .memory import storage_address
from .options import CaptureOptions
from .report import GraphRow, Report, describe
from .trimming import Trimmer

logger = logging.getLogger("ostinato.graphs")

Standing = tuple[dict[GraphKey, tuple[int, int]], dict[GraphKey, tuple[int, int]]]
"""Graphs that were taken down, in service and new, each with its replays and their real tokens."""

_MOST_READY = 4096


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    """Everything needed to serve one shape: the dispatcher's decision, carried out in advance."""

    graph: CapturedGraph
    plan: FillPlan
    leaves: list[Any]
    """The outputs without padded rows."""
    volatile: list[torch.Tensor]
    """Outputs that the next replay overwrites (with strong outputs: the next replay of the same graph)."""


class CudaGraphRunner:
    """Runs a step of varying batch size from captured graphs.

    `step(**inputs)` gets one tensor per declared field and returns any pytree. It must do all its device
    work on the current stream, and everything else it reads must stay at the same addresses (see `watch`).
    If it has a parameter named `descriptor`, that is the batch it is captured for, or in an eager step the
    batch it runs: the only value besides tensors that may decide what work it does.

    Use it from one thread at a time: captures and replays of all runners take turns, but the next replay of
    any runner on the same pool overwrites what a replay returned.
    """

    def __init__(
        self,
        step: Step,
        buffers: InputBuffers,
        keys: Sequence[GraphKey],
        *,
        dispatcher: Dispatcher | None = None,
        pool: GraphPool | None = None,
        options: CaptureOptions | None = None,
        state: Mapping[str, torch.Tensor] | None = None,
        sinks: Mapping[str, torch.Tensor] | None = None,
        dummy: Callable[[BatchDescriptor], Batch] | None = None,
        record_dummy: Callable[[BatchDescriptor], Batch] | None = None,
        make_batch: MakeBatch | None = None,
        output_dim: int = 0,
        rows_per_request: int = 1,
        rows_are_independent: bool = True,
        agree: Callable[[Collection[GraphKey]], Collection[GraphKey]] | None = None,
        compile_up_to: int = 0,
        kernels_of: Callable[[GraphKey], Hashable] | None = None,
        warmups_give_back: bool = False,
        debug: bool = False,
    ) -> None:
        """Captures nothing yet; see `capture`.

        Args:
            step: the function to run.
            buffers: the static inputs.
            keys: what to capture; `capture_keys` makes them from ladders.
            dispatcher: chooses the graph for each step; default: mode FULL.
            pool: memory to share with other runners; default: a new pool.
            state: tensors that the step changes and trial runs must not; default: a journal finds them.
            sinks: memory that padded rows may read and write.
            dummy: representative inputs for warm-up and recording; default: padding only.
            record_dummy: inputs for the recording, if they differ from those of the warm-up.
            make_batch: makes inputs for `verify`; default: random ones.
            output_dim: the dimension that counts the rows of outputs, if their sizes leave that open.
            rows_per_request: number of rows that outputs may have per request.
            rows_are_independent: whether rows can be assumed independent of each other. If False, graphs are
                tried after capture with only some of their rows real; all are dropped if real rows differ
                grossly from those without padding.
            agree: called on every rank after every capture, with the keys captured here (none if the capture
                raised); returns those that all ranks have. The others are dropped.
            compile_up_to: rungs of at most this many tokens go through torch.compile.
            kernels_of: keys for which it returns equal values run the same kernels, so one warm-up serves
                all of them: that of the first key (with `state`, of the last key of that size). A key that
                meets a cold kernel anyway is warmed up itself. Default: each key is.
            warmups_give_back: run all warm-ups before the first recording and return their memory to the
                device, because recordings use the pool's own. Slower; for steps that take much memory.
            debug: check addresses before every replay, and mark outputs so that late use is detected.
        """
        self.step = step
        self.buffers = buffers
        self.keys = tuple(sorted(set(keys), key=capture_order))
        self.dispatcher = dispatcher or Dispatcher(GraphMode.FULL)
        self.pool = pool or GraphPool(buffers.device)
        self.options = options or CaptureOptions()
        self.debug = debug
        self.poison = False
        """Replay in poison mode: padded rows, the sinks and dead outputs hold hostile values."""
        self.graphs: dict[GraphKey, CapturedGraph] = {}
        self._new: dict[GraphKey, CapturedGraph] = {}
        """Graphs of a capture that is still running."""
        self.predicted: dict[GraphKey, int] = {}
        """By how many bytes each graph was expected to make the pool grow, if it was weighed."""
        self.failures: dict[GraphKey, str] = {}
        """Rungs that could not be captured, with the cause."""
        self.eager_steps: Counter[Reason] = Counter()
        self.sinks = dict(sinks or {})
        self.make_batch = make_batch
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
        self._dummy, self._rows_are_independent, self._agree = dummy, rows_are_independent, agree
        self._output_rows = (output_dim, rows_per_request)
        self.outputs = Trimmer(*self._output_rows)
        """Which rows of the outputs are real."""
        self._arena_address = buffers.arena.data_ptr()
        self._ready: dict[BatchShape, _Ready] = {}
        self._ready_version = self.dispatcher.version
        self._check_keys(self.keys)
        if self.pool.device != buffers.device:
            raise ConfigError(f"the pool is on {self.pool.device}, but the buffers are on {buffers.device}")

    @property
    def backend(self) -> Backend:
        """What captures and replays on this device."""
        return self.pool.backend

    # -- capture -----------------------------------------------------------------------------------

    def capture(self, keys: Iterable[GraphKey] | None = None, *, progress: bool | None = None) -> Report:
        """Capture every key that has no graph yet, largest first. Returns the report.

        `keys`: capture these keys instead; new ones are allowed. This also works between two steps of a
        serving engine: the batch in the buffers is restored afterwards.

        A rung that runs out of memory is skipped, and so is one that fails otherwise, unless
        `options.strict`. The report has the cause, and batches of such rungs run from a larger graph or
        eagerly. If this raises, none of the graphs of the call is used. `progress`: show a progress bar
        (default: when standard error is a terminal).
        """
        if keys is not None:
            keys = tuple(keys)
            self._check_keys(keys)
            self.keys = tuple(sorted({*self.keys, *keys}, key=capture_order))
        if self.graphs:
            self._addresses.check()  # more graphs must not make moved weights look right
        missing = [key for key in self.keys if key not in self.graphs and (keys is None or key in keys)]
        with turn, self.buffers.kept():
            self._capture(missing, progress)
        return self.report()

    def _capture(self, missing: Sequence[GraphKey], progress: bool | None) -> None:
        before = self.pool.bytes
        outputs, self.outputs = self.outputs, self.outputs.copy()
        is_captured = False
        self.pool.join(self)
        for key in missing:
            self.failures.pop(key, None)
        try:
            with capture_gate(), frozen_gc(self.options.freeze_gc), CaptureProgress(missing, progress) as bar:
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
        self._ready.clear()
        self.buffers.holds = None
        counted = [{key: _count(of[key]) for key in of} for of in (self.graphs, self._new)]
        self.graphs.clear()
        self._new.clear()
        self._recorder.bridges.drop()
        return counted[0], counted[1]

    def put_up(self, standing: Standing) -> None:
        """Record them again; only inside `capture_gate()`. Their counters continue."""
        with self.buffers.kept():
            for counts, captured in zip(standing, (self.graphs, self._new), strict=True):
                for key, (replays, real_tokens) in counts.items():
                    self._capture_or_explain(key, captured)
                    if key in captured:
                        captured[key].replays, captured[key].real_tokens = replays, real_tokens
        self._addresses.note_reads(self._recorder.take_reads())

    def capture_one(self, key: GraphKey) -> CapturedGraph:
        """Capture one graph; only inside `capture_gate()`."""
        require_open_gate()
        return self._recorder.capture(key, among=self.keys)

    def try_out(self, key: GraphKey) -> None:
        """Run the step of a key once, on padding, and undo its effects."""
        self._recorder.try_out(key)

    def drop(self, key: GraphKey | None = None) -> None:
        """Drop one graph, or all of them. Dropping the last one frees the memory at once."""
        if key is not None and key not in self.graphs:
            raise ConfigError(f"there is no {key.mode} graph for {key.descriptor} to drop")
        dropped = list(self.graphs) if key is None else [key]
        for gone in dropped:
            self.dispatcher.mark_failed(gone, Reason.NOT_CAPTURED)
        with turn:
            self._forget(dropped)

    def give_up(self, cause: str) -> None:
        """Drop all graphs because none of them can be correct."""
        for key in list(self.graphs):
            self._forget([key])
            self._give_up(key, Reason.CAPTURE_FAILED, cause)

    def refuse(self, cause: str) -> None:
        """Capture nothing, record the cause, and run all steps eagerly."""
        for key in self.keys:
            self._give_up(key, Reason.CAPTURE_FAILED, cause)

    def trials(self) -> Trials:
        """A way to run the step whose effects are undone."""
        return self._recorder.trials()

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
        self._ready.clear()
        self.buffers.holds = None
        for key in keys:
            graph = self.graphs.pop(key, None)
            if graph is not None:
                self.pool.graphs.discard(graph)
        if not self.graphs:
            self.outputs = Trimmer(*self._output_rows)
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
        logger.warning("no %s graph for %s (%s): %s", key.mode, key.descriptor, reason, cause)
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
            return Reason.CAPTURE_FAILED, f"{type(error).__name__}: {error}"
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
        if descriptors and self.outputs.in_doubt(tokens_are_requests=decode_only):
            self._probe_outputs(max(descriptors))
        try:
            self.outputs.check()
            if new and not self._rows_are_independent and self._dummy is not None:
                refuse_dependence_on_the_batch(self, self._dummy, works)
        except CaptureError as error:
            if self.options.strict:
                raise
            self.give_up(f"{type(error).__name__}: {error}")

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

    # -- running -----------------------------------------------------------------------------------

    def decide(self, shape: BatchShape) -> Decision:
        """What a step of this shape will run as, and why."""
        return self.dispatcher.decide(shape)

    def can_run(self, batch: Batch | BatchShape) -> bool:
        """Whether a graph can serve this batch."""
        shape = batch if isinstance(batch, BatchShape) else self.buffers.shape_of(batch)
        return not self.dispatcher.decide(shape).is_eager

    def run(self, batch: Batch, shape: BatchShape | None = None) -> Any:
        """Run one step: decide, then replay or run eagerly. The decision is made before anything is written.

        What a replay returns lives in the pool and is overwritten by the next replay.
        """
        if shape is None:
            shape = self.buffers.shape_of(batch)
        ready = self._ready_for(shape)
        if ready is not None:
            return self._replay(batch, shape, ready)
        decision = self.dispatcher.decide(shape)
        if decision.is_eager:
            return self.run_eagerly(batch, shape, decision.reason)
        if len(self._ready) >= _MOST_READY:
            self._ready.clear()
        ready = self._ready[shape] = self._make_ready(shape, decision)
        return self._replay(batch, shape, ready)

    def replay(self, batch: Batch, shape: BatchShape, decision: Decision) -> Any:
        """Fill the buffers and launch the graph of this decision."""
        if decision == self.dispatcher.decide(shape) and not decision.is_eager:
            return self.run(batch, shape)
        return self._replay(batch, shape, self._make_ready(shape, decision))

    def can_rerun(self, shape: BatchShape) -> bool:
        """Whether this runner's last step was a replay of this shape and the buffers still hold its batch."""
        ready = self._ready_for(shape)
        return ready is not None and ready is self.buffers.holds and not self.poison

    def rerun(self, shape: BatchShape) -> Any:
        """Replay the last graph once more on the inputs that are in the buffers; nothing is copied.

        For steps whose inputs only point to state on the device. BatchError unless `can_rerun`.
        """
        if not self.can_rerun(shape):
            raise BatchError(f"the buffers do not hold a batch of {shape}: call run() with one first")
        return self._replay(None, shape, self._ready[shape])

    def _ready_for(self, shape: BatchShape) -> _Ready | None:
        if self._ready_version != self.dispatcher.version:
            self._ready = {s: ready for s, ready in self._ready.items() if self._still_serves(s, ready)}
            self._ready_version = self.dispatcher.version
        return self._ready.get(shape)

    def _still_serves(self, shape: BatchShape, ready: _Ready) -> bool:
        decision = self.dispatcher.decide(shape)
        if decision.descriptor is None:
            return False
        return self.graphs.get(GraphKey(decision.mode, decision.descriptor)) is ready.graph

    def _replay(self, batch: Batch | None, shape: BatchShape, ready: _Ready) -> Any:
        graph = ready.graph
        with turn:
            if self.debug:
                self.check_addresses()
            self.backend.order_replays()
            if batch is not None:
                self.buffers.fill_as(ready.plan, batch, poison=self.poison)
                self.buffers.holds = ready
            if self.poison:
                self.poison_surroundings()
                self.buffers.holds = None
            self.pool.overwrite()
            graph.lent.overwrite()
            graph.replay()
            graph.replays += 1
            graph.real_tokens += shape.num_tokens
            output = graph.handed_out(ready.leaves)
            (self.pool.lent if self.options.weak_output else graph.lent).outputs = ready.volatile
        if self.debug:
            return guarded(output, self.pool, f"{graph.key.mode} graph {graph.descriptor}", self._is_volatile)
        return output

    def launch(self, graph: CapturedGraph) -> None:
        """Replay a graph on what the buffers hold."""
        with turn:
            self.backend.order_replays()
            self.pool.overwrite()
            graph.replay()

    def run_eagerly(self, batch: Batch, shape: BatchShape, reason: Reason) -> Any:
        """Run the step eagerly on the batch as it is, and count the reason."""
        inputs = self.buffers.on_device(batch, shape)
        self.buffers.holds = None
        self.eager_steps[reason] += 1
        with torch.no_grad():
            return self.step(**self.arguments(inputs, shape.as_descriptor()))

    def arguments(self, inputs: Mapping[str, torch.Tensor], descriptor: BatchDescriptor) -> dict[str, Any]:
        """The step's arguments: its inputs, and the descriptor if it has a parameter for it."""
        return self._recorder.arguments(inputs, descriptor)

    def _make_ready(self, shape: BatchShape, decision: Decision) -> _Ready:
        """Look up everything that replaying this shape needs."""
        if decision.descriptor is None:
            raise BatchError(f"there is no graph to replay: the step runs eagerly ({decision.reason})")
        graph = self.graphs.get(GraphKey(decision.mode, decision.descriptor))
        if graph is None:
            raise BatchError(
                f"there is no {decision.mode} graph for {decision.descriptor}, or it was dropped: call "
                "decide() again"
            )
        with torch.inference_mode(False), torch.no_grad():
            leaves = graph.trimmed(shape, self.outputs.trim)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        strong = not self.options.weak_output
        volatile = [tensor for tensor in tensors if strong or self._is_volatile(tensor)]
        return _Ready(graph, self.buffers.plan(shape, graph.descriptor), leaves, volatile)

    # -- safety ------------------------------------------------------------------------------------

    def watch(self, tensors: Watched) -> None:
        """Watch tensors that graphs read besides their inputs: parameters, caches, tables.

        `tensors`: a mapping from names, a module, or a function that returns a mapping.
        """
        self._addresses.watch(tensors)

    def storages_read(self) -> set[int]:
        """Addresses of the storages that trial runs read, besides inputs."""
        return self._addresses.storages_read

    def reads_hold(self) -> bool:
        """Whether the tensors that the step read, besides those watched by name, are still there."""
        return self._addresses.reads_hold

    def ignore_reads(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not watch these tensors, which the step read: the caller watches them."""
        self._addresses.ignore_reads(tensors)

    def check_addresses(self) -> None:
        """Raise AddressError if anything the graphs read has moved. Call after a weight update or wake-up."""
        self._addresses.check()
        if self.buffers.arena.data_ptr() != self._arena_address:
            names = ", ".join(field.name for field in self.buffers.fields)
            raise AddressError(f"the buffer of input {names} has moved since the graphs were captured")

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

    def _is_volatile(self, tensor: torch.Tensor) -> bool:
        """Whether the next replay may overwrite it: in the pool, an input buffer or a bridge."""
        in_inputs = storage_address(tensor) == storage_address(self.buffers.arena)
        return in_inputs or self._recorder.bridges.contains(tensor.data_ptr()) or self._is_pooled(tensor)

    def report(self) -> Report:
        """What was captured, what it costs, what it served, and why steps ran eagerly."""
        return Report(
            backend=self.backend.name,
            device=str(self.pool.device),
            mode=str(self.dispatcher.mode),
            lowered=self.dispatcher.lowered,
            graphs=tuple(self._rows_of_report()),
            failures={f"{key.mode} {key.descriptor}": cause for key, cause in self.failures.items()},
            eager_steps={str(reason): count for reason, count in self.eager_steps.items()},
            pool_bytes=self.pool.bytes,
            input_bytes=self.buffers.bytes,
        )

    def _rows_of_report(self) -> Iterator[GraphRow]:
        saved = padding_saved(self.graphs, self.keys)
        for key in sorted(self.graphs, key=capture_order):
            row = describe(self.graphs[key])
            yield replace(row, predicted_bytes=self.predicted.get(key), padding_saved=saved[key])

    def verify(
        self, *, make_batch: MakeBatch | None = None, tolerance: float | None = None, seed: int = 0
    ) -> Verification:
        """Compare every graph with the eager step. Raises VerifyError if they disagree, and AddressError if
        something that graphs read has moved."""
        self.check_addresses()
        return verify(self, make_batch=make_batch or self.make_batch, tolerance=tolerance, seed=seed)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a runner cannot be copied or pickled: its graphs are addresses of this process")


def _count(graph: CapturedGraph) -> tuple[int, int]:
    return graph.replays, graph.real_tokens
