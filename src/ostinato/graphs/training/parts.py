"""One part of a model served from graphs, with its backward."""

import logging
import types
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..capturing.autocast import AutocastState
from ..capturing.gate import is_recording, turn
from ..capturing.pool import GraphPool, Lent
from ..checking.addresses import moved_error
from ..checking.stale import guarded_by
from ..dispatching.descriptor import BatchShape
from ..dispatching.dispatch import Reason
from ..dispatching.ladder import Ladder
from ..dispatching.mode import GraphMode
from ..dispatching.step_mode import decided_step_mode
from ..errors import BatchError, ConfigError
from ..inputs.buffers import Batch
from ..trees import map_tensors
from ..wrapping.effects import Stepped
from ..wrapping.signature import EmptyBatchError
from ..wrapping.transforms import has_replaced_parameters, inside_transform
from .in_flight import Call, InFlight
from .part_recording import Pair, PartRecorder, Rows
from .python_values import PythonValues

logger = logging.getLogger("ostinato.graphs")

_CAPTURE_AGAIN = "call make_graphed_callables() again to capture as things are"


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
        in_flight: InFlight,
        *,
        may_wait: bool,
        guards_results: bool,
        allow_unused: bool,
    ) -> None:
        """`may_wait`: whether calls beyond those that may be in flight run eagerly; otherwise they raise.
        `guards_results`: hand out results in the memory of the graphs, with a guard, instead of copies."""
        self._module = function if isinstance(function, torch.nn.Module) else None
        self.function = plain_forward(function)
        """What the part does without graphs."""
        self.number, self._pool, self._in_flight = number, pool, in_flight
        self._may_wait, self._guards_results = may_wait, guards_results
        self._values = PythonValues(
            function if self._module else self.function,  # its own hooks run around it, parameters' after it
            with_hooks_of=lambda owner: isinstance(owner, torch.nn.Module) and owner is not function,
            runs=f"calls of part {number}",
            capture_again="make_graphed_callables()",
        )
        self.recorder = PartRecorder(
            number,
            self.function,
            self._module,
            self._values,
            args,
            kwargs,
            ladder,
            pool,
            num_places=len(in_flight),
            allow_unused=allow_unused,
        )
        self._places = self.recorder.places
        self._told: set[str] = set()
        self.eager_steps: Counter[Reason] = Counter()
        """Calls without a graph, by reason."""
        self.replays = 0

    def settle(self) -> None:
        """Called when all capture sizes are recorded, and a module has its new `forward`."""
        self._places.note()
        self._values.note()
        self._surroundings = self._now()
        for pool in (self._pool, *self.recorder.pools):
            pool.graphs.add(self)

    @property
    def leaves(self) -> list[Any]:
        """All outputs, of all capture sizes."""
        return [leaf for pairs in self.recorder.pairs.values() for pair in pairs for leaf in pair.leaves]

    def _now(self) -> tuple[Any, ...]:
        wanted = [p.requires_grad for p in self._module.parameters()] if self._module else []
        return AutocastState.now(), wanted

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy of the module runs eagerly: graphs read the memory of the original."""
        method = self.function
        if isinstance(method, types.MethodType):
            is_of_class = getattr(type(method.__self__), "forward", None) is method.__func__
            return _bound, (method.__self__, None if is_of_class else method.__func__)
        raise TypeError("a part cannot be copied or pickled: graphs are addresses of this process")

    # -- deciding ----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """From a graph if one serves the call, else eagerly."""
        if is_recording() or decided_step_mode() is GraphMode.NONE:
            return self.function(*args, **kwargs)
        if inside_transform():
            return self._eagerly(Reason.TRANSFORMED, args, kwargs)
        try:
            found = self.recorder.signature.batch_of(args, kwargs)
        except EmptyBatchError:
            return self._eagerly(Reason.EMPTY_BATCH, args, kwargs)
        except BatchError:  # arguments without rows have another size than in the samples
            found = None
        if found is None:
            self._tell_of_arguments(args, kwargs)
            return self._eagerly(Reason.UNSEEN_SIGNATURE, args, kwargs)
        batch, shape = found
        reason = self._why_not(batch)
        if reason is not None:
            return self._eagerly(reason, args, kwargs)
        rung, reason = self._rung_for(shape.num_tokens)
        if rung is None:
            return self._eagerly(reason, args, kwargs)
        if moved := self._places.moved():
            if has_replaced_parameters():
                return self._eagerly(Reason.TRANSFORMED, args, kwargs)
            raise moved_error(moved, "call make_graphed_callables again")
        place = self._in_flight.free_place()
        if place is None:
            self._refuse_or_tell_of_calls_in_flight(batch)
            return self._eagerly(Reason.IN_FLIGHT, args, kwargs)
        return self._replayed(self.recorder.pairs[rung][place], place, batch, shape)

    def _eagerly(self, reason: Reason, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.eager_steps[reason] += 1
        return self.function(*args, **kwargs)

    def _why_not(self, batch: Batch) -> Reason | None:
        for name, tensor in batch.items():
            if tensor.requires_grad and not self.recorder.wants[name] and torch.is_grad_enabled():
                self._tell(
                    f"{name} requires a gradient and did not in the samples",
                    "pass sample_args with requires_grad_(), or detach() it",
                )
                return Reason.UNSEEN_SIGNATURE
        autocast, wanted = self._now()
        if autocast != self._surroundings[0]:
            self._tell("autocast is not as at the capture", _CAPTURE_AGAIN)
            return Reason.AUTOCAST_CHANGED
        if (changed := self._values.why_changed()) is not None:
            return changed
        if wanted != self._surroundings[1]:
            if has_replaced_parameters():
                return Reason.TRANSFORMED
            self._tell("parameters were frozen or unfrozen since the capture", _CAPTURE_AGAIN)
            return Reason.ATTRIBUTE_CHANGED
        return None

    def _rung_for(self, rows: int) -> tuple[int | None, Reason]:
        """The capture size for so many rows, or why there is none now."""
        ladder = self.recorder.ladder
        rung = ladder.round_up(rows)
        if rung is None:
            self._tell(
                f"a call has {rows} rows, more than the largest capture size {ladder.limit}", "see ladder="
            )
            return None, Reason.LARGER_THAN_MAX
        if rows < rung and not self.recorder.is_padded:
            self._tell(
                f"fewer rows than {rung}: its results depend on all rows together, or on how many there are, "
                f"so none can be padded",
                "pass as many rows as the samples have, or drop the others (drop_last=True)",
            )
            return None, Reason.PADDING_DISABLED
        return rung, Reason.EXACT

    def _refuse_or_tell_of_calls_in_flight(self, batch: Batch) -> None:
        places, number = len(self._in_flight), self.number
        will_wait = torch.is_grad_enabled() and bool(
            self.recorder.parameters or any(tensor.requires_grad for tensor in batch.values())
        )
        if will_wait and not self._may_wait:
            raise BatchError(
                f"{places} calls of part {number} wait for their backward, and in_flight={places} has memory "
                f"for no more: run a backward first, or pass a larger in_flight= to make_graphed_callables; "
                f"if no backward will come, call the part under torch.no_grad(), or drop its results"
            )
        self._tell(
            "it was called again before the backward of earlier calls whose results are still held",
            f"pass in_flight={places + 1} to make_graphed_callables; if no backward will come, call it "
            f"under torch.no_grad(), or drop its results",
        )

    def _tell_of_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        signature = self.recorder.signature
        try:
            now = type(signature).of(self.function, args, kwargs, batch_dim=0, shared=(), pads={})
            what = now.opaque or signature.difference(now)
        except (BatchError, ConfigError) as error:
            what = str(error)
        self._tell(what, "pass such sample_args to serve these calls from graphs")

    def _tell(self, what: str, instead: str) -> None:
        if instead not in self._told:
            self._told.add(instead)
            logger.warning("calls of part %d run eagerly: %s. To change that: %s", self.number, what, instead)

    # -- replaying ---------------------------------------------------------------------------------

    def _replayed(self, pair: Pair, place: int, batch: Batch, shape: BatchShape) -> Any:
        recorder = self.recorder
        rows = pair.rows(shape.num_tokens, recorder.outputs, recorder.written_arguments)
        call, lent = self._in_flight.begin(place)
        leaves = _Replay.apply(  # type: ignore[no-untyped-call]
            self, pair, rows, call, lent, tuple(batch), *batch.values(), *recorder.parameters
        )
        self.replays += 1
        if self._guards_results:
            origin = f"part {self.number}"
            leaves = tuple(
                guarded_by(leaf, lent, origin) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
            )
        result = pair.structure.filled(list(leaves))
        if isinstance(result, Stepped):
            result, left = result
            self._values.effects.leave(left)
        return result

    def replay_forward(self, pair: Pair, rows: Rows, call: Call, lent: Lent, batch: Batch) -> list[Any]:
        """The outputs without padded rows."""
        call.versions = [tensor._version for tensor in self.recorder.read_by_backward]
        with turn:
            self._pool.backend.order_replays()
            pair.buffers.fill_as(rows.plan, batch)
            pair.forward.graph.replay()
            for name, value in rows.written.items():
                batch[name].copy_(value)
            if not self._guards_results:
                return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in rows.leaves]
        handed = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in rows.leaves]
        # Aliases, which do not hold the history that the results will get.
        lent.outputs = [leaf.detach() for leaf in handed if isinstance(leaf, torch.Tensor)]
        return handed

    def replay_backward(
        self, pair: Pair, rows: Rows, names: tuple[str, ...], call: Call, given: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """Gradients of inputs and parameters. Copies, because autograd may keep what it is given."""
        self._in_flight.check(call)
        self._refuse_changed(call)
        call.has_run_backward = True
        self._pool.backend.order_replays()
        wanted = (
            gradient for gradient, is_wanted in zip(given, pair.differentiable, strict=True) if is_wanted
        )
        for (whole, cut), gradient in zip(rows.grad_outputs, wanted, strict=True):
            if cut is not whole:
                whole.zero_()
            cut.copy_(gradient)
        assert pair.backward is not None
        self._pool.overwrite()
        pair.backward.graph.replay()
        made_gradients, left = pair.backward.output
        if left:
            self.recorder.backward_effects.leave(map_tensors(torch.clone, left))
        made = iter(made_gradients)
        gradients = []
        for name, is_of_rows in zip(names, rows.of_rows, strict=True):
            gradient = next(made) if self.recorder.wants[name] else None
            gradients.append(
                gradient.narrow(0, 0, rows.number) if gradient is not None and is_of_rows else gradient
            )
        return [None if g is None else g.clone() for g in (*gradients, *made)]

    def _refuse_changed(self, call: Call) -> None:
        tensors = self.recorder.read_by_backward
        if call.versions == [tensor._version for tensor in tensors]:
            return
        changed = next(t for t, version in zip(tensors, call.versions, strict=True) if t._version != version)
        named = {**dict(self._module.named_parameters()), **self._places.buffers()} if self._module else {}
        name = next((name for name, tensor in named.items() if tensor is changed), "a tensor")
        raise BatchError(
            f"{name} was changed in place between the forward and the backward of part {self.number}, which "
            f"needs its former value: step the optimizer, and load weights, after the backward"
        )


class _Replay(torch.autograd.Function):
    """A part in autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any, part: Any, pair: Any, rows: Any, call: Any, lent: Any, names: Any, *tensors: Any
    ) -> Any:
        leaves = part.replay_forward(pair, rows, call, lent, dict(zip(names, tensors, strict=False)))
        ctx.call = part, pair, rows, names, call
        plain = zip(leaves, pair.differentiable, strict=True)
        ctx.mark_non_differentiable(
            *(leaf for leaf, wanted in plain if isinstance(leaf, torch.Tensor) and not wanted)
        )
        return tuple(leaves)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        part, pair, rows, names, call = ctx.call
        if torch.is_grad_enabled():
            raise ConfigError(
                f"part {part.number} is to be differentiated twice (create_graph=True, as for a derivative "
                f"in the loss, a gradient penalty or a Hessian), but its backward is a graph without "
                f"history, and the second derivative would be lost: call the part inside `with "
                f'ostinato.graphs.step_mode("none"):`, which runs it eagerly, leave it out of the list, or '
                f"record the whole step with graphed_train_step()"
            )
        return None, None, None, None, None, None, *part.replay_backward(pair, rows, names, call, given)


def plain_forward(function: Callable[..., Any]) -> Callable[..., Any]:
    """What to call without graphs, also of a module or function that is served already."""
    plain: Any = function.forward if isinstance(function, torch.nn.Module) else function
    return plain.function if isinstance(plain, GraphedPart) else plain


def _bound(module: torch.nn.Module, forward: Callable[..., Any] | None) -> Callable[..., Any]:
    return types.MethodType(forward or type(module).forward, module)
