"""Capture a step at every rung, then run each batch from the graph that fits, or eagerly with a reason."""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .backends import Backend
from .capturing.captured import CapturedGraph
from .capturing.gate import capture_gate, frozen_gc, require_open_gate
from .capturing.options import CaptureOptions
from .capturing.pool import GraphPool
from .capturing.progress import CaptureProgress
from .capturing.recorder import Step, StepRecorder
from .capturing.trial import Trials
from .checking.addresses import AddressBook, Watched
from .checking.stale import guarded
from .checking.verify import MakeBatch, Verification, verify
from .dispatching.descriptor import BatchDescriptor, BatchShape
from .dispatching.dispatch import Decision, Dispatcher, Reason
from .dispatching.keys import GraphKey, capture_order
from .dispatching.mode import GraphMode
from .errors import AddressError, BatchError, CaptureError, ConfigError
from .inputs.buffers import Batch, FillPlan, InputBuffers
from .memory import storage_address
from .report import Report, describe
from .trimming import Trimmer

logger = logging.getLogger("ostinato.graphs")

_MOST_READY = 4096


class _Ready(NamedTuple):
    """What serves one shape. The dispatcher's decision, so to speak, already carried out."""

    graph: CapturedGraph
    plan: FillPlan
    leaves: list[Any]
    geometry: list[tuple[Any, Any]]


class CudaGraphRunner:
    """Runs a step of varying batch size from captured graphs.

    `step(**inputs)` gets one tensor per declared field and returns any pytree. It must do all its device
    work on the current stream and find everything else it reads at unchanging addresses (see `watch`). If
    it has a parameter named `descriptor`, it is told what it is captured for (or, eagerly, what it runs):
    the one thing besides tensors that may shape its work.
    Not thread-safe: one runner belongs to one thread.
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
        make_batch: MakeBatch | None = None,
        output_dim: int = 0,
        compile_up_to: int = 0,
        kernels_of: Callable[[GraphKey], Hashable] | None = None,
        debug: bool = False,
    ) -> None:
        """Nothing is captured yet; see `capture`.

        `keys`: what to capture; `capture_keys` makes them from ladders.
        `dispatcher`: who decides; default: mode FULL.
        `pool`: memory shared with other runners; default: one of its own.
        `state`: tensors that the step changes and that trial runs must not; default: a journal finds them.
        `sinks`: the memory that padded rows may read and write.
        `dummy`: representative inputs for warm-up and recording; default: padding only.
        `make_batch`: fresh inputs for `verify`; default: random.
        `output_dim`: where outputs count their rows.
        `compile_up_to`: rungs of at most this many tokens go through torch.compile.
        `kernels_of`: keys for which it returns equal values run the same kernels, so the first of them is
        warmed up for all (one that meets a cold kernel nevertheless is warmed up itself); default: each is.
        `debug`: check addresses before every replay, and mark outputs so that late use is detected.
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
            compile_up_to=compile_up_to,
            kernels_of=kernels_of,
        )
        self._addresses = AddressBook()
        self._trimmer = Trimmer(output_dim)
        self._arena_address = buffers.arena.data_ptr()
        self._ready: dict[BatchShape, _Ready] = {}
        self._ready_version = self.dispatcher.version
        for key in self.keys:
            self.dispatcher.check(key)
            descriptor = key.descriptor
            if descriptor.num_tokens > buffers.max_tokens or descriptor.num_reqs > buffers.max_reqs:
                raise ConfigError(
                    f"a graph for {descriptor} does not fit buffers for {buffers.max_tokens} tokens, "
                    f"{buffers.max_reqs} requests"
                )
        if self.pool.device != buffers.device:
            raise ConfigError(f"the pool is on {self.pool.device}, the buffers are on {buffers.device}")

    @property
    def backend(self) -> Backend:
        """What captures and replays on this device."""
        return self.pool.backend

    # -- capture -----------------------------------------------------------------------------------

    def capture(self, *, progress: bool | None = None) -> Report:
        """Capture every key that has no graph yet, largest first. Returns the report.

        Out of memory gives a rung up and goes on; so does any other failure, unless `options.strict`. Both
        are in the report, and their batches run from a larger graph or eagerly. `progress`: show a bar
        (default: when standard error is a terminal).
        """
        if self.graphs:
            self._addresses.check()  # further graphs must not make moved weights look right
        missing = [key for key in self.keys if key not in self.graphs]
        self.failures.clear()
        before = self.pool.bytes
        with capture_gate(), frozen_gc(self.options.freeze_gc), CaptureProgress(missing, progress) as bar:
            logger.info("capture begins: %d graphs on %s", len(missing), self.pool.device)
            for key in missing:
                bar.start(key)
                self._capture_or_explain(key)
                bar.done(self.pool.bytes)
            self._settle_outputs()
        self._addresses.renew()
        logger.info(
            "capture ends: %d graphs, %d given up, %.2f s, %d bytes",
            sum(key in self.graphs for key in missing),
            len(self.failures),
            bar.seconds,
            self.pool.bytes - before,
        )
        return self.report()

    def capture_one(self, key: GraphKey) -> CapturedGraph:
        """Capture one graph; only inside `capture_gate()`."""
        require_open_gate()
        return self._recorder.capture(key, among=self.keys)

    def try_out(self, key: GraphKey) -> None:
        """Run the step of a key once, on padding and without a trace."""
        self._recorder.try_out(key)

    def drop(self, key: GraphKey | None = None) -> None:
        """Forget one graph, or all of them."""
        for dropped in [key] if key is not None else list(self.graphs):
            self.pool.graphs.discard(self.graphs.pop(dropped))
            self.dispatcher.mark_failed(dropped, Reason.NOT_CAPTURED)
        self.pool.generation += 1  # outputs of a dropped graph lie in memory that may go
        self.pool.shrink_if_unused()

    def trials(self) -> Trials:
        """A way to run the step without a trace."""
        return self._recorder.trials()

    def _capture_or_explain(self, key: GraphKey) -> None:
        failure = self._try_to_capture(key)
        if failure is None:
            return
        # Only here, when nothing of the failed attempt is referred to any more, can its memory go.
        self._give_up(key, *failure)

    def _give_up(self, key: GraphKey, reason: Reason, cause: str) -> None:
        self.failures[key] = cause
        self.dispatcher.mark_failed(key, reason)
        logger.warning("no %s graph for %s (%s): %s", key.mode, key.descriptor, reason, cause)
        self.pool.shrink_if_unused()
        self.backend.release_unused()

    def _try_to_capture(self, key: GraphKey) -> tuple[Reason, str] | None:
        bytes_before = self.pool.bytes
        try:
            graph = self.capture_one(key)
            self._trimmer.observe(graph.descriptor, graph.leaves)
        except torch.OutOfMemoryError as error:
            return Reason.OUT_OF_MEMORY, f"{type(error).__name__}: {error}"
        except Exception as error:
            if self.options.strict:
                raise
            return Reason.CAPTURE_FAILED, f"{type(error).__name__}: {error}"
        if self.pool.over_budget and self.pool.bytes > bytes_before:
            held, budget = self.pool.bytes, self.pool.budget
            return Reason.OUT_OF_MEMORY, f"the pool would hold {held:,} bytes, its budget is {budget:,}"
        self._adopt(graph)
        return None

    def _adopt(self, graph: CapturedGraph) -> None:
        self.graphs[graph.key] = graph
        self.pool.graphs.add(graph)
        self.dispatcher.add(graph.key)
        if self.options.debug_log:
            logger.info("captured %s", describe(graph))

    def _settle_outputs(self) -> None:
        """Know for every output which rows are real, or serve nothing from graphs."""
        descriptors = [key.descriptor for key in self.graphs]
        decode_only = all(descriptor.query_len == 1 for descriptor in descriptors)
        if descriptors and self._trimmer.in_doubt(tokens_are_requests=decode_only):
            self._probe_outputs(max(descriptors))
        try:
            self._trimmer.check()
        except CaptureError as error:
            if self.options.strict:
                raise
            for key in list(self.graphs):
                self.drop(key)
                self._give_up(key, Reason.CAPTURE_FAILED, f"{type(error).__name__}: {error}")

    def _probe_outputs(self, largest: BatchDescriptor) -> None:
        """One eager trial with other numbers of tokens and requests than any rung has.

        A step may be made for one size only: then it fails here, and the likeliest reading stands.
        """
        reqs = max(1, largest.num_reqs - (1 if largest.is_uniform else 2))
        if largest.query_len is not None:
            probe = BatchDescriptor.decode(reqs, largest.query_len, context=largest.context)
        else:
            probe = BatchDescriptor(max(reqs, largest.num_tokens - 1), reqs, context=largest.context)
        try:
            leaves = self._recorder.outputs_at(probe)
        except Exception as error:
            logger.debug("outputs could not be probed with %s: %s", probe, error)
        else:
            self._trimmer.observe(probe, leaves)

    # -- running -----------------------------------------------------------------------------------

    def decide(self, shape: BatchShape) -> Decision:
        """What a step of this shape will run as, and why."""
        return self.dispatcher.decide(shape)

    def can_run(self, batch: Batch | BatchShape) -> bool:
        """Whether a graph can serve this batch."""
        shape = batch if isinstance(batch, BatchShape) else self.buffers.shape_of(batch)
        return not self.dispatcher.decide(shape).is_eager

    def run(self, batch: Batch, shape: BatchShape | None = None) -> Any:
        """One step: decide, then replay or run eagerly. The decision is made before anything is written.

        What a replay returns lives in the pool and is overwritten by the next one.
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
        """Fill the buffers and launch the decided graph."""
        return self._replay(batch, shape, self._make_ready(shape, decision))

    def can_rerun(self, shape: BatchShape) -> bool:
        """Whether the buffers still hold the last batch of this shape, for the graph that serves it."""
        ready = self._ready_for(shape)
        return ready is not None and ready.plan is self.buffers.holds and not self.poison

    def rerun(self, shape: BatchShape) -> Any:
        """One more step on the inputs of the last one, from the same graph: nothing is copied.

        For steps whose inputs say only where on the device the rest is. BatchError unless `can_rerun`.
        """
        if not self.can_rerun(shape):
            raise BatchError(f"the buffers do not hold a batch of {shape}: run() one first")
        return self._replay(None, shape, self._ready[shape])

    def _ready_for(self, shape: BatchShape) -> _Ready | None:
        if self._ready_version != self.dispatcher.version:
            self._ready.clear()
            self._ready_version = self.dispatcher.version
        return self._ready.get(shape)

    def _replay(self, batch: Batch | None, shape: BatchShape, ready: _Ready) -> Any:
        graph, leaves = ready.graph, ready.leaves
        if self.debug:
            self.check_addresses()
        self.backend.order_replays()
        if batch is not None:
            self.buffers.fill_as(ready.plan, batch, poison=self.poison)
        if self.poison:
            self.poison_surroundings()
        graph.replay()
        self.pool.generation += 1
        graph.replays += 1
        graph.real_tokens += shape.num_tokens
        if ready.geometry != _geometry(leaves):  # somebody reshaped in place what was handed out
            leaves = graph.trimmed(shape, self._trimmer.trim)
            self._ready.pop(shape, None)
        output = graph.in_container(leaves)
        if self.debug:
            return guarded(output, self.pool, f"{graph.key.mode} graph {graph.descriptor}", self._is_volatile)
        return output

    def launch(self, graph: CapturedGraph) -> None:
        """Replay a graph on what the buffers hold."""
        self.backend.order_replays()
        graph.replay()
        self.pool.generation += 1

    def run_eagerly(self, batch: Batch, shape: BatchShape, reason: Reason) -> Any:
        """Run the step on the batch as it is, and count why."""
        inputs = self.buffers.on_device(batch, shape)
        self.eager_steps[reason] += 1
        with torch.no_grad():
            return self.step(**self.arguments(inputs, shape.as_descriptor()))

    def arguments(self, inputs: Mapping[str, torch.Tensor], descriptor: BatchDescriptor) -> dict[str, Any]:
        """What the step is called with: its inputs, and the descriptor if it wants to know."""
        return self._recorder.arguments(inputs, descriptor)

    def _make_ready(self, shape: BatchShape, decision: Decision) -> _Ready:
        """All that replaying this shape needs, looked up once."""
        if decision.descriptor is None:
            raise BatchError(f"nothing to replay: the step runs eagerly ({decision.reason})")
        graph = self.graphs.get(GraphKey(decision.mode, decision.descriptor))
        if graph is None:
            raise BatchError(f"there is no {decision.mode} graph for {decision.descriptor} (any more)")
        leaves = graph.trimmed(shape, self._trimmer.trim)
        return _Ready(graph, self.buffers.plan(shape, graph.descriptor), leaves, _geometry(leaves))

    # -- safety ------------------------------------------------------------------------------------

    def watch(self, tensors: Watched) -> None:
        """Name tensors that graphs read besides their inputs: parameters, caches, tables.

        A mapping, a module, or a function that returns a mapping.
        """
        self._addresses.watch(tensors)

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
        return Report.of(self)

    def trim(self, position: int, leaf: torch.Tensor, shape: BatchShape) -> torch.Tensor:
        """The real rows of the output at this position of the flattened result."""
        return self._trimmer.trim(position, leaf, shape)

    def verify(
        self, *, make_batch: MakeBatch | None = None, tolerance: float | None = None, seed: int = 0
    ) -> Verification:
        """Every graph against the eager step; raises VerifyError where they disagree."""
        return verify(self, make_batch=make_batch or self.make_batch, tolerance=tolerance, seed=seed)


def _geometry(leaves: Sequence[Any]) -> list[tuple[Any, Any]]:
    return [(leaf.shape, leaf.stride()) for leaf in leaves if isinstance(leaf, torch.Tensor)]
