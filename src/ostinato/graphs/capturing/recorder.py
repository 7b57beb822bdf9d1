"""Runs and records a step at the sizes of its graphs, without a trace in anything but the graphs."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch

from ..dispatching.descriptor import BatchDescriptor, BatchShape
from ..dispatching.keys import GraphKey
from ..dispatching.mode import GraphMode
from ..dispatching.step_mode import step_mode
from ..errors import CaptureError, ColdKernelError
from ..inputs.buffers import Batch, InputBuffers
from ..journal import writing_inference_tensors
from ..memory import storage_address
from ..options import CaptureOptions
from ..trees import tensors_in
from .autocast import clean_autocast_cache
from .budget import Weight
from .captured import CapturedGraph, Recorded, record, with_outputs_of_their_own
from .compiled import CompiledSteps
from .gate import turn
from .pool import GraphPool
from .segments import Bridges
from .trial import Trials

Step = Callable[..., Any]


class StepRecorder:
    """What a capture needs to know of a step. The arguments are those of `CudaGraphRunner`."""

    def __init__(
        self,
        step: Step,
        buffers: InputBuffers,
        pool: GraphPool,
        options: CaptureOptions,
        *,
        state: Mapping[str, torch.Tensor] | None,
        sinks: Mapping[str, torch.Tensor],
        dummy: Callable[[BatchDescriptor], Batch] | None,
        record_dummy: Callable[[BatchDescriptor], Batch] | None,
        compile_up_to: int,
        kernels_of: Callable[[GraphKey], Hashable] | None,
        warmups_give_back: bool,
    ) -> None:
        self.bridges = Bridges(pool.allocate_for_graphs)
        """What crosses from one segment of a piecewise graph to the next."""
        self._reads: dict[int, torch.Tensor] = {}
        self._step, self._buffers, self._pool, self._options = step, buffers, pool, options
        self._state, self._sinks, self._dummy, self._record_dummy = state, sinks, dummy, record_dummy
        is_field = any(field.name == "descriptor" for field in buffers.fields)
        self._wants_descriptor = not is_field and _has_parameter(step, "descriptor")
        self._compiled = CompiledSteps(step, compile_up_to, pool.device)
        self._kernels_of, self._warmups_give_back = kernels_of, warmups_give_back
        self._warm: set[Hashable] = set()
        self._tried: set[GraphKey] = set()
        self._works: dict[GraphKey, list[tuple[Any, str]]] = {}

    def arguments(self, inputs: Mapping[str, torch.Tensor], descriptor: BatchDescriptor) -> dict[str, Any]:
        """What the step is called with: its inputs, and the descriptor if it wants to know."""
        return {**inputs, "descriptor": descriptor} if self._wants_descriptor else dict(inputs)

    def trials(self) -> Trials:
        """A way to run the step without a trace."""
        return Trials(
            self._pool.backend, state=self._state, sinks=self._sinks, generators=self._options.generators
        )

    def take_reads(self) -> list[torch.Tensor]:
        """What trial runs used since last asked, besides inputs and what they made themselves."""
        reads = list(self._reads.values())
        self._reads.clear()
        return reads

    def take_works(self) -> dict[GraphKey, list[tuple[Any, str]]]:
        """The ops that warm-ups were seen to run since last asked."""
        works, self._works = self._works, {}
        return works

    def take_as_warm(self, kernels: Iterable[Hashable]) -> None:
        """Steps that run these need no warm-up."""
        self._warm.update(kernels)

    def warm_up(self, keys: Sequence[GraphKey]) -> None:
        """Where captures give the memory of their warm-ups back: those of all that is about to be captured.
        Later ones would run beside the memory of graphs that are there already."""
        if not self._warmups_give_back or self._state is None or not self._options.weak_output:
            return
        for key in keys:
            if key.mode is GraphMode.PIECEWISE or self._compiled.applies(key):
                continue
            with suppress(Exception), self.quiet():  # capturing it will tell
                step = partial(self._step, **self._dummy_arguments(key.descriptor, self._dummy))
                trials = self.trials()
                for _ in range(self._options.warmups):
                    trials.run(step)
                self._tried.add(key)
        self._pool.backend.release_unused()

    def capture(self, key: GraphKey, among: Sequence[GraphKey]) -> CapturedGraph:
        """The graph of one key; `among`: all that will be asked for."""
        started = time.perf_counter()
        self._compiled.reserve(among)
        is_warm = self._is_warm(key) or self._is_warm_by_another(key, among)
        try:
            recorded = self._record(key, 0 if is_warm else self._options.warmups)
        except Exception as error:
            if not is_warm or not _is_cold(error):
                raise
            recorded = self._record(key, self._options.warmups)
        if self._kernels_of is not None:
            self._warm.add(self._kernels_of(key))
        return CapturedGraph(key, recorded, time.perf_counter() - started)

    def _is_warm_by_another(self, key: GraphKey, among: Sequence[GraphKey]) -> bool:
        """Warm up the last graph of this size with the same kernels instead, which has least to do, if there
        is another.

        Only where the step's state is known: else the warm-up of a graph is also what finds it.
        """
        if self._kernels_of is None or self._state is None or self._compiled.applies(key):
            return False
        kernels, num_tokens = self._kernels_of(key), key.descriptor.num_tokens
        alike = [each for each in among if each.descriptor.num_tokens == num_tokens]
        last = next((each for each in reversed(alike) if self._kernels_of(each) == kernels), key)
        if last == key:
            return False
        for _ in range(self._options.warmups):
            self.try_out(last)
        return True

    def weigh(self, key: GraphKey, among: Sequence[GraphKey]) -> Weight:
        """What the graph of one key takes: it is captured in memory of its own, and dropped."""
        kept = self._pool, self.bridges
        self._pool = GraphPool(self._pool.device)
        self.bridges = Bridges(self._pool.allocate_for_graphs)
        try:
            return self._weighed(key, among)
        finally:
            self._pool, self.bridges = kept
            self._pool.backend.release_unused()

    def _weighed(self, key: GraphKey, among: Sequence[GraphKey]) -> Weight:
        graph = self.capture(key, among)
        bridges = self.bridges.bytes
        weight = Weight(self._pool.memory.bytes, bridges, self._pool.bytes_beside - bridges)
        del graph
        return weight

    def _is_warm(self, key: GraphKey) -> bool:
        if key in self._tried:
            self._tried.discard(key)
            return True
        # torch.compile makes other kernels for every rung.
        if self._kernels_of is None or self._compiled.applies(key):
            return False
        return self._kernels_of(key) in self._warm

    def try_out(self, key: GraphKey) -> None:
        """Run the step of a key once, on padding, and not as torch.compile would have it."""
        self.output_at(key.descriptor)

    def output_at(self, descriptor: BatchDescriptor) -> Any:
        """What the step returns for a size that may have no graph."""
        return self.run_within(nullcontext(), descriptor)

    def run_within(self, watching: AbstractContextManager[Any], descriptor: BatchDescriptor) -> Any:
        """The same, from a run within this context; the context is for the step alone."""

        def step() -> Any:
            with watching:
                return self._step(**arguments)

        with self.quiet():
            arguments = self._dummy_arguments(descriptor, self._dummy)
            return self.trials().run(step)

    def _record(self, key: GraphKey, warmups: int) -> Recorded:
        step = self._compiled.for_key(key)
        with self.quiet():
            arguments = self._dummy_arguments(key.descriptor, self._dummy)
            trials = self.trials()
            ours = {storage_address(self._buffers.arena)}
            piecewise = key.mode is GraphMode.PIECEWISE
            strong = not self._options.weak_output
            if step is not self._step or (piecewise and self._state is None) or strong:
                # Compiled code hides its writes from the journal, a piecewise recording executes, and strong
                # outputs need to know their shapes: each wants one observed run before the others.
                like = trials.run(lambda: self._step(**arguments))
                if strong:
                    step, places = with_outputs_of_their_own(step, like, self._pool.allocate_for_graphs)
                    ours |= {storage_address(place) for place in tensors_in(places)}
                del like
            for number in range(warmups):
                trials.run(lambda: step(**arguments), observed=not self._compiled.applies(key))
                if number == 0 and warmups == 1 and trials.makes_state:
                    # One more: only a second run tells state from what is made once and only read later.
                    trials.run(lambda: step(**arguments), observed=not self._compiled.applies(key))
            if trials.obstacle is not None:
                raise CaptureError(trials.obstacle)
            if not self._compiled.applies(key):
                trials.repeat_until_steady(lambda: step(**arguments))
            self._works[key] = trials.work
            self._reads |= {
                at: tensor for tensor in trials.reads if (at := storage_address(tensor)) not in ours
            }
            if self._may_hold_compiled_code():
                # Watched, it ran as it was written. This compiles it, which no capture can.
                trials.run(lambda: step(**arguments), observed=False)
            if self._record_dummy is not None:
                self._dummy_arguments(key.descriptor, self._record_dummy)
            if self._warmups_give_back:
                self._pool.backend.release_unused()
            allowing = writing_inference_tensors() if trials.writes_inference_tensors else nullcontext()
            with trials.undone(), allowing:
                return record(
                    lambda: step(**arguments), self._pool, self._options, self.bridges, piecewise=piecewise
                )

    def _may_hold_compiled_code(self) -> bool:
        """Whether torch.compile may have made something of what the step calls; a tape sees through that."""
        is_watched = self._state is None and self._pool.backend.name != "tape"
        return is_watched and "torch._dynamo" in sys.modules

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Where trial runs and recordings happen: on our stream, outside whatever mode the caller is in, and
        while no other thread does anything with graphs."""
        with turn, self._pool.backend.stream(), torch.inference_mode(False), torch.no_grad():
            # Wrappers inside the step are part of its graph.
            with clean_autocast_cache(), step_mode(GraphMode.NONE):
                yield

    def _dummy_arguments(
        self, descriptor: BatchDescriptor, dummy: Callable[[BatchDescriptor], Batch] | None
    ) -> dict[str, Any]:
        """Representative inputs of this size, in the buffers."""
        if dummy is None:
            self._buffers.fill_padding(descriptor)
        else:
            shape = BatchShape(descriptor.num_tokens, descriptor.num_reqs, descriptor.query_len)
            self._buffers.fill(dummy(descriptor), shape, descriptor)
        return self.arguments(self._buffers.views(descriptor), descriptor)


def _is_cold(error: BaseException | None) -> bool:
    """Whether something was not there yet that a run of the step makes; kernels may say so themselves."""
    while error is not None:
        if isinstance(error, ColdKernelError) or getattr(error, "is_cold", False):
            return True
        error = error.__cause__ or error.__context__
    return False


def _has_parameter(function: Step, name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins show no signature
        return False
