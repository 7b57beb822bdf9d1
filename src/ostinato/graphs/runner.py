"""Captures a step at every rung, then runs each batch from the graph that fits, or eagerly with a reason."""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from .capturing.budget import padding_saved
from .capturing.captured import CapturedGraph
from .capturing.gate import turn
from .capturing.pool import GraphPool
from .capturing.recorder import Step
from .checking.addresses import Watched
from .checking.verify import MakeBatch, Verification, verify
from .dispatching.descriptor import BatchDescriptor, BatchShape
from .dispatching.dispatch import Decision, Dispatcher, Reason
from .dispatching.keys import GraphKey, capture_order
from .errors import AddressError, BatchError, ConfigError
from .graph_set import GraphSet
from .inputs.buffers import Batch, FillPlan, InputBuffers
from .inputs.fields import Field
from .inputs.staging import as_tensor
from .memory import storage_address
from .options import CaptureOptions
from .report import GraphRow, Report, describe
from .results import HandingOut, History, Results

_MOST_READY = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """Everything needed to serve one shape: the dispatcher's decision, carried out in advance."""

    graph: CapturedGraph
    plan: FillPlan
    leaves: list[Any]
    """The outputs without padded rows."""
    volatile: list[torch.Tensor]
    """Outputs that the next replay overwrites (with strong outputs: the next replay of the same graph)."""
    handing_out: HandingOut | None
    """How outputs become results; None if they are results as they are."""
    written: list[tuple[Field, torch.Tensor]]
    """The inputs that the step writes, without padded rows."""


class CudaGraphRunner(GraphSet):
    """Runs a step of varying batch size from captured graphs.

    `step(**inputs)` gets one tensor per declared field and returns any pytree. It must do all its device
    work on the current stream, and everything else it reads must stay at the same addresses (see `watch`).
    If it has a parameter named `descriptor`, that is the batch it is captured for, or in an eager step the
    batch it runs: the only value besides tensors that may decide what work it does.

    Captures and replays of all runners take turns, so several threads may call one. With results that are not
    copies use it from one thread at a time: the next replay of any runner on the same pool overwrites them.
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
        results: Results | str = Results.COPIED,
        written: Collection[str] = (),
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
            results: what a replay returns: copies, or tensors over memory that the next replay overwrites,
                with or without a guard (see `Results`). Copies cost their bandwidth and one launch each.
            written: inputs that the step writes in place. What it leaves in their real rows is copied back to
                the batch's own tensors. Without this, writes to inputs stay in the buffers.
            debug: check addresses before every replay, and guard results that are not copies.
        """
        super().__init__(
            step,
            buffers,
            keys,
            dispatcher=dispatcher,
            pool=pool,
            options=options,
            state=state,
            sinks=sinks,
            dummy=dummy,
            record_dummy=record_dummy,
            output_dim=output_dim,
            rows_per_request=rows_per_request,
            rows_are_independent=rows_are_independent,
            agree=agree,
            compile_up_to=compile_up_to,
            kernels_of=kernels_of,
            warmups_give_back=warmups_give_back,
        )
        self.debug = debug
        self.results = Results.parse(results)
        """What a replay returns."""
        if self.results is Results.UNGUARDED and debug:
            self.results = Results.GUARDED
        self._written = tuple(written)
        if unknown := set(written) - {field.name for field in buffers.fields}:
            raise ConfigError(f"written names {', '.join(sorted(unknown))}, which no field has")
        self.poison = False
        """Replay in poison mode: padded rows, the sinks and dead outputs hold hostile values."""
        self.eager_steps: Counter[Reason] = Counter()
        self.make_batch = make_batch
        self._arena_address = buffers.arena.data_ptr()
        self._ready: dict[BatchShape, Ready] = {}
        self._ready_version = self.dispatcher.version

    def capture(self, keys: Iterable[GraphKey] | None = None, *, progress: bool | None = None) -> Report:
        """Capture every key that has no graph yet, largest first. Returns the report.

        `keys`: capture these keys instead; new ones are allowed. This also works between two steps of a
        serving engine: the batch in the buffers is restored afterwards.

        A rung that runs out of memory is skipped, and so is one that fails otherwise, unless
        `options.strict`. The report has the cause, and batches of such rungs run from a larger graph or
        eagerly. If this raises, none of the graphs of the call is used. `progress`: show a progress bar
        (default: when standard error is a terminal).
        """
        self._capture_missing(keys, progress)
        return self.report()

    def _graphs_changed(self) -> None:
        """Nothing is ready any more."""
        super()._graphs_changed()
        self._ready.clear()

    # -- running -----------------------------------------------------------------------------------

    def decide(self, shape: BatchShape) -> Decision:
        """What a step of this shape will run as, and why."""
        return self.dispatcher.decide(shape)

    def can_run(self, batch: Batch | BatchShape) -> bool:
        """Whether a graph can serve this batch."""
        shape = batch if isinstance(batch, BatchShape) else self.buffers.shape_of(batch)
        return not self.dispatcher.decide(shape).is_eager

    def run(self, batch: Batch, shape: BatchShape | None = None) -> Any:
        """Run one step: decide, then replay or run eagerly. The decision comes before anything is written."""
        if shape is None:
            shape = self.buffers.shape_of(batch)
        ready = self.prepared(shape)
        if isinstance(ready, Decision):
            return self.run_eagerly(batch, shape, ready.reason)
        return self._replay(batch, shape, ready)

    def prepared(self, shape: BatchShape) -> Ready | Decision:
        """Returns what a replay for this shape needs; where none serves it, the decision to run it eagerly.
        Valid until graphs come or go."""
        ready = self._ready_for(shape)
        if ready is None:
            decision = self.dispatcher.decide(shape)
            if decision.is_eager:
                return decision
            if len(self._ready) >= _MOST_READY:
                self._ready.clear()
            ready = self._ready[shape] = self._make_ready(shape, decision)
        return ready

    def run_prepared(
        self,
        ready: Ready,
        batch: Batch,
        shape: BatchShape,
        *,
        is_plain: bool = False,
        history: History | None = None,
    ) -> Any:
        """Replay what was prepared. `is_plain`: the batch has the types and shapes of the fields, in their
        order, and is known to be of plain tensors without gradients on the device. `history`: gives copied
        results one for autograd, see `HandingOut`."""
        return self._replay(batch, shape, ready, is_plain, history)

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

    def _ready_for(self, shape: BatchShape) -> Ready | None:
        if self._ready_version != self.dispatcher.version:
            self._ready = {s: ready for s, ready in self._ready.items() if self._still_serves(s, ready)}
            self._ready_version = self.dispatcher.version
        return self._ready.get(shape)

    def _still_serves(self, shape: BatchShape, ready: Ready) -> bool:
        decision = self.dispatcher.decide(shape)
        if decision.descriptor is None:
            return False
        return self.graphs.get(GraphKey(decision.mode, decision.descriptor)) is ready.graph

    def _replay(
        self,
        batch: Batch | None,
        shape: BatchShape,
        ready: Ready,
        is_plain: bool = False,
        history: History | None = None,
    ) -> Any:
        graph = ready.graph
        with turn:
            if self.debug:
                self.check_addresses()
            self.pool.backend.order_replays()
            if batch is not None:
                if is_plain and not self.poison:
                    self.buffers.fill_with(ready.plan, list(batch.values()))
                else:
                    self.buffers.fill_as(ready.plan, batch, poison=self.poison)
                self.buffers.holds = ready
            if self.poison:
                self.poison_surroundings()
                self.buffers.holds = None
            self.pool.lent.overwrite()
            graph.lent.overwrite()
            graph.replay()
            graph.replays += 1
            graph.real_tokens += shape.num_tokens
            if ready.handing_out is not None:
                return self._handed_out(batch, ready, ready.handing_out, history)
            output = graph.handed_out(ready.leaves)
            (self.pool.lent if self.options.weak_output else graph.lent).outputs = ready.volatile
            return output

    def _handed_out(
        self, batch: Batch | None, ready: Ready, handing_out: HandingOut, history: History | None
    ) -> Any:
        """Copy back what the step has written into its inputs, and copy or guard its outputs."""
        graph = ready.graph
        if ready.written and batch is not None:
            with torch.no_grad():
                for field, rows in ready.written:
                    target = batch[field.name]
                    if not isinstance(target, torch.Tensor):
                        target = as_tensor(target, field.dtype)
                    if not self._is_overwritten(target):
                        target.copy_(rows)
        if self.results is Results.COPIED:
            return graph.structured(handing_out.copied(batch, history))
        lent = self.pool.lent if self.options.weak_output else graph.lent
        lent.outputs = ready.volatile
        origin = f"{graph.key.mode} graph {graph.descriptor}"
        return graph.structured(handing_out.guarded(batch, lent, origin))

    def run_eagerly(self, batch: Batch, shape: BatchShape, reason: Reason) -> Any:
        """Run the step eagerly on the batch as it is, and count the reason."""
        inputs = self.buffers.on_device(batch, shape)
        self.buffers.holds = None
        self.eager_steps[reason] += 1
        with torch.no_grad():
            return self.step(**self.arguments(inputs, shape.as_descriptor()))

    def _make_ready(self, shape: BatchShape, decision: Decision) -> Ready:
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
        plan = self.buffers.plan(shape, graph.descriptor)
        rows = list(zip(self.buffers.fields, plan.heads, strict=True))
        volatile = [tensor for tensor in tensors if strong or self._is_volatile(tensor)]
        handing_out = None
        if self.results is not Results.UNGUARDED:
            overwritten = set(map(id, volatile))
            inputs = {field.name: head for field, head in rows}
            handing_out = HandingOut(leaves, lambda leaf: id(leaf) in overwritten, inputs)
        written = [(field, head) for field, head in rows if field.name in self._written]
        return Ready(graph, plan, leaves, volatile, handing_out, written)

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

    def _is_volatile(self, tensor: torch.Tensor) -> bool:
        """Whether the next replay may overwrite it: in the pool, an input buffer or a bridge."""
        in_inputs = storage_address(tensor) == storage_address(self.buffers.arena)
        return in_inputs or self._recorder.bridges.contains(tensor.data_ptr()) or self._is_pooled(tensor)

    def _is_overwritten(self, tensor: torch.Tensor) -> bool:
        """Whether it is an earlier result, in memory that this replay has used: the caller has lost it."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._is_volatile(tensor)

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
