"""Serves the calls of one function from graphs: captures at the first call, then decides for each."""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..capturing.captured import CapturedGraph
from ..capturing.options import CaptureOptions
from ..capturing.pool import GraphPool
from ..checking.verify import Verification
from ..dispatching.descriptor import BatchDescriptor, BatchShape
from ..dispatching.dispatch import Dispatcher, Reason
from ..dispatching.keys import GraphKey
from ..dispatching.ladder import Ladder
from ..dispatching.mode import GraphMode
from ..dispatching.step_mode import decided_step_mode, step_mode
from ..errors import BatchError, VerifyError
from ..inputs.buffers import Batch, InputBuffers
from ..inputs.fields import Scalar
from ..report import Report
from ..runner import CudaGraphRunner
from .signature import Examples, Signature


class _Entry:
    """The graphs of one call signature, and the surroundings they were captured in."""

    def __init__(self, signature: Signature, runner: CudaGraphRunner, surroundings: tuple[Any, ...]) -> None:
        self.signature = signature
        self.runner = runner
        self.surroundings = surroundings
        self.must_check_addresses = False


class GraphedCall:
    """Decides for each call whether a graph serves it. What `graphed` returns holds one of these."""

    def __init__(
        self,
        function: Callable[..., Any],
        ladder: Ladder,
        *,
        batch_dim: int,
        mode: GraphMode,
        shared: Sequence[str],
        pads: Mapping[str, Scalar],
        pool: GraphPool | None,
        options: CaptureOptions,
        compile_up_to: int,
        debug: bool,
    ) -> None:
        self.function = function
        self.ladder = ladder
        self.mode = mode
        self.eager_steps: Counter[Reason] = Counter()
        self._batch_dim = batch_dim
        self._shared = shared
        self._pads = pads
        self._pool = pool
        self._options = options
        self._compile_up_to = compile_up_to
        self._debug = debug
        self._entries: list[_Entry] = []
        self._modules = list(function.modules()) if isinstance(function, torch.nn.Module) else []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Serve one call from a graph if the step's mode lets this wrapper act; capture at the first call."""
        decided = decided_step_mode()
        if decided is not None and decided is not self.mode:
            return self.function(*args, **kwargs)
        if self.mode is GraphMode.NONE:
            return self._eagerly(Reason.DISABLED, args, kwargs)
        if not self._entries:
            self.capture(*args, **kwargs)
        found = self._find(args, kwargs)
        if found is None:
            return self._eagerly(Reason.UNSEEN_SIGNATURE, args, kwargs)
        entry, batch, shape = found
        changed = _what_changed(entry.surroundings, self._surroundings(entry.runner.pool.device))
        if changed is not None:
            return self._eagerly(changed, args, kwargs)
        decision = entry.runner.decide(shape)
        if decision.is_eager:
            return self._eagerly(decision.reason, args, kwargs)
        if entry.must_check_addresses:
            entry.runner.check_addresses()
            entry.must_check_addresses = False
        if self.mode is GraphMode.FULL:
            return entry.runner.run(batch, shape)
        with step_mode(GraphMode.NONE):  # eager calls between segments may hold wrappers of their own
            return entry.runner.run(batch, shape)

    def capture(self, *args: Any, **kwargs: Any) -> Report:
        """Capture every rung for calls like this one; further signatures may be added the same way."""
        signature = Signature.of(
            self.function, args, kwargs, batch_dim=self._batch_dim, shared=self._shared, pads=self._pads
        )
        found = signature.batch_of(args, kwargs)
        if found is None:
            raise BatchError("the arguments do not agree with each other")
        batch, _ = found
        self._entries = [entry for entry in self._entries if not entry.signature.same_as(signature)]
        with torch.inference_mode(False), torch.no_grad():
            runner = self._runner(signature, batch)
        runner.capture()
        self._entries.append(_Entry(signature, runner, self._surroundings(runner.pool.device)))
        return self.report()

    def recapture(self) -> Report:
        """Capture everything again, after weights have moved."""
        for entry in self._entries:
            entry.runner.drop()
            entry.runner.capture()
            entry.must_check_addresses = False
        return self.report()

    def check_addresses(self) -> None:
        """Raise AddressError if a parameter or buffer has moved since the capture."""
        for entry in self._entries:
            entry.runner.check_addresses()

    def addresses_may_have_moved(self) -> None:
        """Have every signature's next replay check addresses first."""
        for entry in self._entries:
            entry.must_check_addresses = True

    def report(self) -> Report:
        """What was captured and what it served."""
        if not self._entries:
            return Report.of_nothing(self.mode, self.eager_steps)
        return Report.joined([entry.runner.report() for entry in self._entries])

    def verify(self, *, tolerance: float | None = None, seed: int = 0) -> Verification:
        """Every graph against the eager function on fresh inputs drawn from the first call's."""
        if not self._entries:
            raise VerifyError("nothing to verify: no call has been captured yet")
        with step_mode(GraphMode.NONE):  # wrappers inside this one are part of its graph
            outcomes = [entry.runner.verify(tolerance=tolerance, seed=seed) for entry in self._entries]
        return Verification(tuple(check for outcome in outcomes for check in outcome.checks))

    def graphs(self) -> list[CapturedGraph]:
        """All captured graphs."""
        return [graph for entry in self._entries for graph in entry.runner.graphs.values()]

    # -- internals ---------------------------------------------------------------------------------

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Entry, Batch, BatchShape] | None:
        for entry in self._entries:
            matched = entry.signature.batch_of(args, kwargs)
            if matched is not None:
                return entry, *matched
        return None

    def _eagerly(self, reason: Reason, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.eager_steps[reason] += 1
        below = GraphMode.PIECEWISE if self.mode is GraphMode.FULL else GraphMode.NONE
        with step_mode(below), torch.no_grad():
            return self.function(*args, **kwargs)

    def _runner(self, signature: Signature, batch: Batch) -> CudaGraphRunner:
        device = self._device(batch)
        if self._pool is None:
            self._pool = GraphPool(device)
        limit = self.ladder.limit
        examples = Examples(signature, batch)
        runner = CudaGraphRunner(
            functools.partial(_call_with, signature, self.function),
            InputBuffers(signature.tensor_fields, max_tokens=limit, device=self._pool.device),
            [GraphKey(self.mode, self._descriptor(size)) for size in self.ladder],
            dispatcher=Dispatcher(self.mode),
            pool=self._pool,
            options=self._options,
            dummy=examples.dummy,
            make_batch=examples.random,
            output_dim=self._batch_dim,
            compile_up_to=self._compile_up_to,
            debug=self._debug,
        )
        runner.eager_steps = self.eager_steps
        if isinstance(self.function, torch.nn.Module):
            runner.watch(self.function)
        return runner

    def for_copy(self, function: Callable[..., Any]) -> "GraphedCall":
        """The same settings for a copy of the function; graphs read the original's memory and stay here."""
        return GraphedCall(
            function,
            self.ladder,
            batch_dim=self._batch_dim,
            mode=self.mode,
            shared=self._shared,
            pads=self._pads,
            pool=None,
            options=self._options,
            compile_up_to=self._compile_up_to,
            debug=self._debug,
        )

    def _descriptor(self, size: int) -> BatchDescriptor:
        return BatchDescriptor.decode(size) if self.mode is GraphMode.FULL else BatchDescriptor(size, size)

    def _device(self, batch: Batch) -> torch.device:
        devices = [tensor.device for tensor in batch.values()]
        if isinstance(self.function, torch.nn.Module):
            devices += [parameter.device for parameter in self.function.parameters()]
        return next((device for device in devices if device.type != "cpu"), devices[0])

    def _surroundings(self, device: torch.device) -> tuple[Any, ...]:
        autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        return autocast, [module.training for module in self._modules]


def _call_with(signature: Signature, function: Callable[..., Any], /, **inputs: torch.Tensor) -> Any:
    return signature.call(function, inputs)


def _what_changed(captured: tuple[Any, ...], now: tuple[Any, ...]) -> Reason | None:
    if captured == now:
        return None
    return Reason.AUTOCAST_CHANGED if captured[0] != now[0] else Reason.TRAINING_MODE_CHANGED
