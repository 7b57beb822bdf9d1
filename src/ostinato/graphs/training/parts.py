"""One part of a model from graphs, with its backward."""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from ..capturing import python_draws
from ..capturing.autocast import AutocastState
from ..capturing.captured import Recorded, record
from ..capturing.gate import is_recording, turn
from ..capturing.pool import GraphPool
from ..capturing.segments import Bridges
from ..capturing.trial import Trials
from ..checking.addresses import moved_error
from ..dispatching.descriptor import BatchDescriptor, BatchShape
from ..dispatching.dispatch import Reason
from ..dispatching.ladder import Ladder
from ..dispatching.mode import GraphMode
from ..dispatching.step_mode import decided_step_mode
from ..errors import BatchError, CaptureError
from ..inputs.buffers import Batch, InputBuffers
from ..journal import WriteJournal
from ..options import CaptureOptions
from ..trees import Structure, flatten, tensors_in
from ..wrapping.signature import Examples, Signature
from .gradients import leaves_behind, without_hooks
from .part_padding import RowTrial, with_poison
from .places import Places, Written, written_by
from .python_values import PythonValues
from .rounds import Rounds

logger = logging.getLogger("ostinato.graphs")


class _Pair:
    """Forward and backward of one part at one rung."""

    def __init__(self, descriptor: BatchDescriptor) -> None:
        self.descriptor = descriptor
        self.forward: Recorded
        self.backward: Recorded | None = None
        self.structure: Structure
        self.differentiable: list[bool] = []
        self.grad_outputs: list[torch.Tensor] = []


class GraphedPart:
    """One callable, served from graphs with its backward."""

    def __init__(
        self,
        number: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ladder: Ladder | None,
        pool: GraphPool,
        rounds: Rounds,
        *,
        allow_unused: bool,
    ) -> None:
        self.function = function.forward if isinstance(function, torch.nn.Module) else function
        self._module = function if isinstance(function, torch.nn.Module) else None
        self._number, self._pool, self._rounds, self._allow_unused = number, pool, rounds, allow_unused
        self._signature = Signature.of(self.function, args, kwargs, batch_dim=0, shared=(), pads={})
        found = self._signature.batch_of(args, kwargs)
        if found is None or self._signature.opaque is not None:
            raise BatchError(f"sample arguments of part {number} must be tensors and plain values")
        batch, shape = found
        self.ladder = ladder or Ladder([shape.num_tokens])
        self._examples = Examples(self._signature, batch)
        self._wants = {name: tensor.requires_grad for name, tensor in batch.items()}
        self._parameters = [p for p in (self._module.parameters() if self._module else ()) if p.requires_grad]
        self._modules = [self._module] if self._module else []
        self._places = Places(self._modules)
        self._written = Written({}, ())
        self._values = PythonValues(
            function,  # its own hooks run around it, parameters' hooks after it
            with_hooks_of=lambda owner: isinstance(owner, torch.nn.Module) and owner is not function,
        )
        self._is_padded = True
        """Whether fewer rows than a rung has are padded."""
        self._buffers = InputBuffers(
            [with_poison(field, batch[field.name]) for field in self._signature.tensor_fields],
            max_tokens=self.ladder.limit,
            device=pool.device,
            allocate=pool.allocate,
        )
        self._pairs: dict[int, _Pair] = {}
        self._alive: tuple[list[Any], list[torch.Tensor]] | None = None
        self.eager_steps: Counter[Reason] = Counter()
        """Calls without a graph, by reason."""
        self.replays = 0

    # -- capturing ---------------------------------------------------------------------------------

    def find_written(self, options: CaptureOptions) -> None:
        """Record what the part writes when it runs. Raises CaptureError if Python carries state over."""
        trials, rung = self._trials(options), self.ladder.limit
        with self._values.put_back(), trials.undone():
            views = self._fill(rung)
            own = [*self._places.buffers().values(), *views.values()]
            self._written = written_by(lambda: self._try(rung), besides=own)
            carries = self._values.why_no_graph(lambda: self._journal_of(rung))
        self._alive = None
        if carries is not None:
            raise CaptureError(f"part {self._number}: {carries}")

    def _journal_of(self, rung: int) -> WriteJournal:
        journal = WriteJournal()
        try:
            with suppress(Exception), journal:  # code that must not be watched raises; real failures recur
                self._try(rung)
        finally:
            journal.undo()
        return journal

    def _trials(self, options: CaptureOptions) -> Trials:
        state = {**self._places.buffers(), **self._written.tensors}
        generators = tuple(dict.fromkeys([*options.generators, *self._written.generators]))
        return Trials(self._pool.backend, state=state, generators=generators)

    def warm_up(self, rung: int, times: int, options: CaptureOptions) -> None:
        """Run forward and backward, without a trace."""
        trials = self._trials(options)
        with self._values.first_step():
            trials.run(lambda: self._try(rung))
        with self._values.named():
            for _ in range(1, times):
                trials.run(lambda: self._try(rung))

    def find_dependence_on_the_batch(self, options: CaptureOptions) -> None:
        """Determine whether real rows depend on what padded rows hold, or on the number of rows: then nothing
        is padded, and a ladder of several rungs raises CaptureError."""
        rung = self.ladder.limit
        if rung < 2:
            return
        call = functools.partial(self._signature.call, self.function)
        trial = RowTrial(call, self._buffers, self._examples, self._modules, rung)
        self._is_padded = trial.is_alike(self._trials(options))
        if not self._is_padded and len(self.ladder) > 1:
            raise CaptureError(
                f"the rows of part {self._number} depend on each other or on how many there are, so none can "
                f"be padded: leave out ladder=, or keep such layers outside the part"
            )

    def _try(self, rung: int) -> None:
        output = self._run_forward(rung)
        assert self._alive is not None
        known = [*self._alive[1], *self._parameters]
        for leaf in leaves_behind(tensors_in(output)):
            if not any(leaf is one for one in known):
                raise CaptureError(
                    f"part {self._number} uses a tensor {list(leaf.shape)} that requires a gradient but is "
                    f"neither its argument nor its parameter, so it would get none: pass it as an argument"
                )
        self._run_backward(None)

    def _run_forward(self, rung: int) -> Any:
        views = self._fill(rung)
        inputs = {name: view.detach().requires_grad_(self._wants[name]) for name, view in views.items()}
        with torch.enable_grad(), python_draws.refused_in_graphs():
            output = self._signature.call(self.function, inputs)
        self._alive = ([output], list(inputs.values()))
        return output

    def _fill(self, rung: int) -> dict[str, torch.Tensor]:
        descriptor = BatchDescriptor.decode(rung)
        if not is_recording():
            self._buffers.fill(self._examples.dummy(descriptor), BatchShape.decode(rung), descriptor)
        return self._buffers.views(descriptor)

    def _run_backward(self, given: Sequence[torch.Tensor] | None) -> list[torch.Tensor | None]:
        assert self._alive is not None
        (output,), inputs = self._alive
        self._alive = None
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        wanted = [tensor for tensor in (*inputs, *self._parameters) if tensor.requires_grad]
        if not outputs or not wanted:
            return []
        if given is None:
            given = [torch.ones_like(tensor) for tensor in outputs]
        with torch.enable_grad(), without_hooks(self._parameters):
            return list(torch.autograd.grad(outputs, wanted, list(given), allow_unused=self._allow_unused))

    def record_forward(self, rung: int, bridges: Bridges, options: CaptureOptions) -> None:
        """The first half of a pair; what autograd keeps stays alive until the second."""
        pair = self._pairs[rung] = _Pair(BatchDescriptor.decode(rung))
        self._fill(rung)
        pair.forward = record(lambda: self._run_forward(rung), self._pool, options, bridges, piecewise=False)
        assert self._alive is not None
        leaves, pair.structure = flatten(self._alive[0][0])
        without_rows = [t for t in tensors_in(leaves) if t.dim() == 0 or t.size(0) != rung]
        self._is_padded = self._is_padded and not without_rows
        if without_rows and len(self.ladder) > 1:
            raise CaptureError(
                f"part {self._number} returns {list(without_rows[0].shape)}, which does not have one row for "
                f"each row of its inputs, so padding cannot be cut off"
            )
        pair.differentiable = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
        pair.grad_outputs = [
            torch.zeros_like(leaf, requires_grad=False)
            for leaf, wanted in zip(leaves, pair.differentiable, strict=True)
            if wanted
        ]

    def record_backward(self, rung: int, bridges: Bridges, options: CaptureOptions) -> None:
        """The second half."""
        pair = self._pairs[rung]
        if pair.grad_outputs:
            pair.backward = record(
                lambda: self._run_backward(pair.grad_outputs), self._pool, options, bridges, piecewise=False
            )
        self._alive = None

    def settle(self) -> None:
        """Called when all rungs are captured, and a module has its new `forward`."""
        self._places.note()
        self._values.note()
        self._surroundings = self._now()
        self._pool.graphs.add(self)

    @property
    def leaves(self) -> list[Any]:
        """All outputs, of all rungs."""
        return [leaf for pair in self._pairs.values() for leaf in flatten(pair.forward.output)[0]]

    def _now(self) -> tuple[Any, ...]:
        wanted = [p.requires_grad for p in self._module.parameters()] if self._module else []
        return AutocastState.now(), wanted

    # -- running -----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """From a graph if one serves the call, else eagerly."""
        if is_recording() or decided_step_mode() is GraphMode.NONE:
            return self.function(*args, **kwargs)
        found = self._signature.batch_of(args, kwargs)
        reason = self._why_not(found)
        if reason is not None:
            self.eager_steps[reason] += 1
            return self.function(*args, **kwargs)
        assert found is not None
        batch, shape = found
        rows = shape.num_tokens
        rung = self._rounds.rung_for(self._number, self.ladder.round_up(rows), rows)
        if rung is None or rung not in self._pairs:
            self.eager_steps[Reason.LARGER_THAN_MAX] += 1
            return self.function(*args, **kwargs)
        moved = self._places.moved()
        if moved:
            raise moved_error(moved, "call make_graphed_callables again")
        if rows < rung and not self._is_padded:
            self._tell_of_fewer_rows(rung)
            self.eager_steps[Reason.PADDING_DISABLED] += 1
            return self.function(*args, **kwargs)
        pair = self._pairs[rung]
        tensors = _Replay.apply(self, pair, shape, tuple(batch), *batch.values(), *self._parameters)  # type: ignore[no-untyped-call]
        self.replays += 1
        return pair.structure.filled(list(tensors))

    def _tell_of_fewer_rows(self, rung: int) -> None:
        if not self.eager_steps[Reason.PADDING_DISABLED]:
            logger.warning(
                "fewer rows than %d run eagerly in part %d: its results depend on all rows together, or on "
                "how many there are, so none can be padded",
                rung,
                self._number,
            )

    def _why_not(self, found: tuple[Batch, BatchShape] | None) -> Reason | None:
        if found is None or any(t.requires_grad and not self._wants[n] for n, t in found[0].items()):
            return Reason.UNSEEN_SIGNATURE
        autocast, wanted = self._now()
        if autocast != self._surroundings[0]:
            return Reason.AUTOCAST_CHANGED
        if (changed := self._values.why_changed()) is not None:
            return changed
        if wanted != self._surroundings[1]:
            return Reason.ATTRIBUTE_CHANGED
        return None

    def replay_forward(self, pair: _Pair, shape: BatchShape, batch: Batch) -> tuple[int, list[Any]]:
        """The number of the round, and outputs without padded rows."""
        with turn:
            self._pool.backend.order_replays()
            round_number = self._rounds.enter(self._number, pair.descriptor.num_tokens)
            self._buffers.fill(batch, shape, pair.descriptor)
            self._pool.overwrite()
            pair.forward.graph.replay()
        leaves = [
            leaf.narrow(0, 0, shape.num_tokens) if self._has_rows(leaf, pair) else leaf
            for leaf in flatten(pair.forward.output)[0]
        ]
        handed = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._rounds.lend([leaf for leaf in handed if isinstance(leaf, torch.Tensor)])
        return round_number, handed

    def _has_rows(self, leaf: Any, pair: _Pair) -> bool:
        return (
            isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.size(0) == pair.descriptor.num_tokens
        )

    def replay_backward(
        self, pair: _Pair, shape: BatchShape, names: tuple[str, ...], number: int, given: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """Gradients of inputs and parameters. Copies, because autograd may keep what it is given."""
        self._rounds.leave(self._number, number)
        self._pool.backend.order_replays()
        wanted = [
            gradient for gradient, is_wanted in zip(given, pair.differentiable, strict=True) if is_wanted
        ]
        for place, gradient in zip(pair.grad_outputs, wanted, strict=True):
            if place.shape == gradient.shape:
                place.copy_(gradient)
            else:
                place[: shape.num_tokens].copy_(gradient)
                place[shape.num_tokens :].zero_()
        assert pair.backward is not None
        self._pool.overwrite()
        pair.backward.graph.replay()
        made = iter(flatten(pair.backward.output)[0])
        by_input = [next(made) if self._wants[name] else None for name in names]
        trimmed = [
            g.narrow(0, 0, shape.num_tokens) if g is not None and self._has_rows(g, pair) else g
            for g in by_input
        ]
        return [None if g is None else g.clone() for g in (*trimmed, *made)]


class _Replay(torch.autograd.Function):
    """A part in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, part: Any, pair: Any, shape: Any, names: Any, *tensors: Any) -> Any:
        number, leaves = part.replay_forward(pair, shape, dict(zip(names, tensors, strict=False)))
        ctx.call = part, pair, shape, names, number
        plain = zip(leaves, pair.differentiable, strict=True)
        ctx.mark_non_differentiable(
            *(leaf for leaf, wanted in plain if isinstance(leaf, torch.Tensor) and not wanted)
        )
        return tuple(leaves)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *given: Any) -> Any:
        part, pair, shape, names, number = ctx.call
        return None, None, None, None, *part.replay_backward(pair, shape, names, number, given)
