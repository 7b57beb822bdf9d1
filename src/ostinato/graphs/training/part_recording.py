"""Recording the forward and the backward of one part of a model; see Note [Calls in flight]."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import torch

from ..capturing import python_draws
from ..capturing.captured import Recorded, record
from ..capturing.gate import is_recording
from ..capturing.pool import GraphPool
from ..capturing.segments import Bridges
from ..capturing.trial import Trials
from ..dispatching.descriptor import BatchDescriptor, BatchShape
from ..dispatching.ladder import Ladder
from ..errors import BatchError, CaptureError
from ..inputs.buffers import InputBuffers
from ..inputs.fields import Extent, Field
from ..journal import WriteJournal
from ..memory import storage_address
from ..options import CaptureOptions
from ..trees import Structure, flatten, map_tensors, tensors_in
from ..trimming import Trimmer
from ..wrapping.effects import Effects, Stepped
from ..wrapping.reached import Reached
from ..wrapping.signature import Examples, Signature
from .gradients import leaves_behind, without_hooks
from .part_padding import RowTrial, with_poison
from .places import Places, Written, written_by
from .python_values import PythonValues


class Rows:
    """What replays of a pair with one number of real rows read and write, without padding."""

    def __init__(self, pair: "Pair", rows: int, outputs: Trimmer, written: Sequence[str]) -> None:
        shape = BatchShape.decode(rows)
        self.number = rows
        self.plan = pair.buffers.plan(shape, pair.descriptor)

        def cut(position: int, leaf: torch.Tensor) -> torch.Tensor:
            return leaf if rows == pair.descriptor.num_tokens else outputs.trim(position, leaf, shape)

        self.leaves = [
            cut(position, leaf) if isinstance(leaf, torch.Tensor) else leaf
            for position, leaf in enumerate(pair.leaves)
        ]
        wanted = [position for position, is_wanted in enumerate(pair.differentiable) if is_wanted]
        self.grad_outputs = [
            (whole, cut(position, whole)) for position, whole in zip(wanted, pair.grad_outputs, strict=True)
        ]
        views, fields = pair.buffers.views(pair.descriptor), pair.buffers.fields
        self.of_rows = [field.per is Extent.TOKEN for field in fields]
        """For each input, whether its gradient has padded rows."""
        self.written = {
            field.name: views[field.name].narrow(0, 0, rows) if is_of_rows else views[field.name]
            for field, is_of_rows in zip(fields, self.of_rows, strict=True)
            if field.name in written
        }
        """The arguments that the part changes in place, as it leaves them."""


class Pair:
    """Forward and backward of one part at one capture size, in one place."""

    def __init__(self, descriptor: BatchDescriptor, buffers: InputBuffers) -> None:
        self.descriptor = descriptor
        self.buffers = buffers
        self.forward: Recorded
        self.backward: Recorded | None = None
        self.structure: Structure
        self.leaves: list[Any] = []
        self.differentiable: list[bool] = []
        self.grad_outputs: list[torch.Tensor] = []
        self._by_rows: dict[int, Rows] = {}

    def rows(self, rows: int, outputs: Trimmer, written: Sequence[str]) -> Rows:
        """What replays with so many real rows need."""
        found = self._by_rows.get(rows)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                found = self._by_rows[rows] = Rows(self, rows, outputs, written)
        return found


class PartRecorder:
    """Tries one part, and records it at every capture size as often as calls of it may be in flight."""

    def __init__(
        self,
        number: int,
        function: Callable[..., Any],
        module: torch.nn.Module | None,
        values: PythonValues,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ladder: Ladder | None,
        pool: GraphPool,
        *,
        num_places: int,
        allow_unused: bool,
    ) -> None:
        """`function`: what is called; `module`: whose parameters get gradients."""
        self._number, self._function, self._pool, self._values = number, function, pool, values
        self._allow_unused = allow_unused
        self.signature = _signature_of(number, function, args, kwargs)
        found = self.signature.batch_of(args, kwargs)
        assert found is not None, "samples are of their own kind"
        batch, shape = found
        self.ladder = ladder or Ladder([shape.num_tokens])
        self._examples = Examples(self.signature, batch)
        self.wants = {name: tensor.requires_grad for name, tensor in batch.items()}
        """Whether each input gets a gradient."""
        self.parameters = [p for p in (module.parameters() if module else ()) if p.requires_grad]
        """The parameters that get gradients."""
        self._module = module
        self.places = Places([module] if module else [])
        fields = [with_poison(field, batch[field.name]) for field in self.signature.tensor_fields]
        self._buffers = [
            InputBuffers(fields, max_tokens=self.ladder.limit, device=pool.device, allocate=pool.allocate)
            for _ in range(num_places)
        ]
        self.pools = [pool.apart() for _ in range(num_places)]
        """The memory of each place: of the forward graphs alone."""
        self.pairs: dict[int, list[Pair]] = {}
        """By capture size, one for each place."""
        self.outputs = Trimmer(several_each=True)
        """Which rows of the results are real."""
        self.is_padded = True
        """Whether fewer rows than a capture size has are padded."""
        self.written_arguments: list[str] = []
        """Arguments that the part changes in place."""
        self.read_by_backward: list[torch.Tensor] = []
        """Parameters and buffers that the backward needs as they were in the forward."""
        self.backward_effects = Effects()
        """What the backward leaves in Python."""
        self._written = Written({}, ())
        self._alive: dict[int, tuple[Any, list[torch.Tensor]]] = {}
        """By place, the result and the inputs of a forward, with autograd's graph between them."""

    # -- trials ------------------------------------------------------------------------------------

    def find_written(self, options: CaptureOptions) -> None:
        """Find out what the part writes when it runs and what its backward reads. Raises CaptureError if
        Python carries state over."""
        trials, rung = self._trials(options), self.ladder.limit
        with self._values.put_back() as before, trials.undone():
            if (why := before.why_closed()) is not None:
                raise CaptureError(f"part {self._number}: {why}")
            views = self._fill(rung, 0)
            own = [*self.places.buffers().values(), *views.values()]
            self._written = written_by(lambda: self._try(rung), besides=own)
            self._find_effects(before, rung)
            carries = self._values.why_no_graph(lambda: self._journal_of(rung))
            carries = carries or self._values.why_not_left(before) or self.backward_effects.refusal
            self._trials(options).run(lambda: self._find_saved(rung))
        if carries is not None:
            raise CaptureError(f"part {self._number}: {carries}")

    def _find_effects(self, before: Reached, rung: int) -> None:
        """What the forward leaves in Python, and what else the backward does."""
        self._values.effects = self._values.find_effects(
            before, lambda: self._journal_of(rung, with_backward=False)
        )
        self.backward_effects = self._values.find_effects(
            before, lambda: self._journal_of(rung), besides=self._values.effects
        )

    def _journal_of(self, rung: int, *, with_backward: bool = True) -> WriteJournal:
        journal = WriteJournal()
        try:
            with suppress(Exception), journal:  # code that must not be watched raises; real failures recur
                if with_backward:
                    self._try(rung)
                else:
                    self._run_forward(rung, 0)
                    self._alive.clear()
        finally:
            journal.undo()
        return journal

    def _find_saved(self, rung: int) -> None:
        saved: set[int] = set()

        def note(tensor: torch.Tensor) -> torch.Tensor:
            saved.add(storage_address(tensor))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            self._run_forward(rung, 0)
        self._alive.clear()
        own = [*self.parameters, *self.places.buffers().values()]
        self.read_by_backward = [tensor for tensor in own if storage_address(tensor) in saved - {0}]

    def _trials(self, options: CaptureOptions) -> Trials:
        state = {**self.places.buffers(), **self._written.tensors}
        generators = tuple(dict.fromkeys([*options.generators, *self._written.generators]))
        return Trials(self._pool.backend, state=state, generators=generators)

    def find_dependence_on_the_batch(self, options: CaptureOptions) -> None:
        """Determine whether real rows depend on what padded rows hold, or on the number of rows: then nothing
        is padded, and a ladder of several capture sizes raises CaptureError."""
        rung = self.ladder.limit
        if rung < 2:
            return
        call = functools.partial(self.signature.call, self._function)
        modules = [self._module] if self._module else []
        trial = RowTrial(call, self._buffers[0], self._examples, modules, rung, self.outputs)
        self.is_padded = trial.is_alike(self._trials(options))
        if not self.is_padded and len(self.ladder) > 1:
            raise CaptureError(
                f"the rows of part {self._number} depend on each other or on how many there are, so none can "
                f"be padded: leave out ladder=, or keep such layers outside the part"
            )

    def undone_in_python(self) -> AbstractContextManager[None]:
        """A context for captures: what these leave in Python is undone."""
        return self._values.captured()

    def warm_up(self, rung: int, times: int, options: CaptureOptions) -> None:
        """Run forward and backward, without a trace."""
        trials = self._trials(options)
        with self._values.first_step():
            trials.run(lambda: self._try(rung))
        for _ in range(1, times):
            trials.run(lambda: self._try(rung))

    def _try(self, rung: int) -> None:
        output = self._run_forward(rung, 0)
        known = [*self._alive[0][1], *self.parameters]
        for leaf in leaves_behind(tensors_in(output)):
            if not any(leaf is one for one in known):
                raise CaptureError(
                    f"part {self._number} uses a tensor {list(leaf.shape)} that requires a gradient but is "
                    f"neither its argument nor its parameter, so it would get none: pass it as an argument, "
                    f"or make the part a module that has it as a parameter"
                )
        del output
        self._run_backward(0, None, keeps_saved=False)
        self._alive.clear()

    # -- running -----------------------------------------------------------------------------------

    def _run_forward(self, rung: int, place: int) -> Any:
        views, arena = self._fill(rung, place), self._buffers[place].arena
        inputs = {name: view.detach().requires_grad_(self.wants[name]) for name, view in views.items()}
        version = arena._version
        left: list[Any] = []
        try:
            with torch.enable_grad(), python_draws.refused_in_graphs(), self._values.effects.noted() as left:
                output = self.signature.call(self._function, inputs)
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):
                raise
            raise CaptureError(
                f"part {self._number} changes an argument in place that requires a gradient, and a graph "
                f"works on a copy of it: clone it first, or use an operation that is not in place ({error})"
            ) from error
        if arena._version != version and not is_recording():
            self._note_written_arguments(rung, views)
        if left:
            output = Stepped(output, left)
        self._alive[place] = output, list(inputs.values())
        return output

    def _note_written_arguments(self, rung: int, views: dict[str, torch.Tensor]) -> None:
        before = self._examples.dummy(BatchDescriptor.decode(rung))
        for name, view in views.items():
            if name not in self.written_arguments and not torch.equal(view, before[name].to(view.device)):
                self.written_arguments.append(name)

    def _fill(self, rung: int, place: int) -> dict[str, torch.Tensor]:
        descriptor, buffers = BatchDescriptor.decode(rung), self._buffers[place]
        if not is_recording():
            buffers.fill(self._examples.dummy(descriptor), BatchShape.decode(rung), descriptor)
        return buffers.views(descriptor)

    def _run_backward(
        self, place: int, given: Sequence[torch.Tensor] | None, *, keeps_saved: bool
    ) -> Stepped:
        """The gradients, and what the backward leaves in Python. `keeps_saved`: free nothing of the forward's
        while this is recorded into another pool."""
        output, inputs = self._alive[place]
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        wanted = [tensor for tensor in (*inputs, *self.parameters) if tensor.requires_grad]
        if not outputs or not wanted:
            return Stepped([], [])
        if given is None:
            given = [torch.ones_like(tensor) for tensor in outputs]
        effects = self.backward_effects
        with torch.enable_grad(), without_hooks(self.parameters), effects.noted() as left:
            gradients = torch.autograd.grad(
                outputs, wanted, list(given), retain_graph=keeps_saved, allow_unused=True
            )
        if any(gradient is not None and gradient.layout is not torch.strided for gradient in gradients):
            raise CaptureError(
                f"part {self._number} makes a sparse gradient, which has no fixed address: use sparse=False, "
                f"or keep that layer outside the part"
            )
        if not self._allow_unused and any(gradient is None for gradient in gradients):
            self._refuse_unused(
                [t for t, gradient in zip(wanted, gradients, strict=True) if gradient is None]
            )
        return Stepped(list(gradients), map_tensors(torch.Tensor.detach, left))

    def _refuse_unused(self, unused: Sequence[torch.Tensor]) -> None:
        named = self.places.names_of(self.parameters)
        names = [next((name for name, p in named if p is tensor), "an argument") for tensor in unused]
        raise CaptureError(
            f"part {self._number} does not use {', '.join(names[:3])}{' and others' if names[3:] else ''}, "
            f"which requires a gradient: pass allow_unused_input=True, or requires_grad_(False)"
        )

    # -- recording ---------------------------------------------------------------------------------

    def record_forward(self, rung: int, place: int, bridges: Bridges, options: CaptureOptions) -> None:
        """The first half of a pair; what autograd keeps stays alive until `release`."""
        pair = Pair(BatchDescriptor.decode(rung), self._buffers[place])
        self.pairs.setdefault(rung, []).append(pair)
        self._fill(rung, place)
        pair.forward = record(
            lambda: self._run_forward(rung, place), self.pools[place], options, bridges, piecewise=False
        )
        leaves, pair.structure = flatten(self._alive[place][0])
        pair.leaves = flatten(pair.forward.output)[0]
        if place == 0:
            self._observe(rung, pair.forward.output)
        pair.differentiable = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
        first = self.pairs[rung][0]
        pair.grad_outputs = first.grad_outputs or [
            torch.zeros_like(leaf, requires_grad=False)
            for leaf, wanted in zip(leaves, pair.differentiable, strict=True)
            if wanted
        ]

    def _observe(self, rung: int, output: Any) -> None:
        self.outputs.observe(BatchDescriptor.decode(rung), output)
        try:
            self.outputs.check()
        except CaptureError as error:
            self.is_padded = False
            if len(self.ladder) > 1:
                raise CaptureError(f"part {self._number}: {error}") from error

    def record_backward(self, rung: int, place: int, bridges: Bridges, options: CaptureOptions) -> None:
        """The second half."""
        pair = self.pairs[rung][place]
        if not pair.grad_outputs:
            return
        pair.backward = record(
            lambda: self._run_backward(place, pair.grad_outputs, keeps_saved=True),
            self._pool,
            options,
            bridges,
            piecewise=False,
        )

    def release(self) -> None:
        """Everything of one capture size is recorded: smaller ones may use the memory of their places."""
        self._alive.clear()
        self._values.effects.let_go()


def _signature_of(
    number: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Signature:
    """The signature of the samples. The first tensor tells the number of rows; tensors with another size
    along dimension 0 have none."""
    signature = Signature.of(function, args, kwargs, batch_dim=0, shared=(), pads={})
    if signature.opaque is not None:
        raise BatchError(f"sample arguments of part {number} must be tensors and plain values")
    leaves = flatten((args, dict(sorted(kwargs.items()))))[0]
    pairs = list(zip(signature.fields, leaves, strict=True))
    rows = next(leaf.size(0) for field, leaf in pairs if field is not None and field.per is Extent.TOKEN)

    def settled(field: Field | None, leaf: Any) -> Field | None:
        if field is None or field.per is not Extent.TOKEN or leaf.size(0) == rows:
            return field
        return replace(field, per=Extent.FIXED, shape=tuple(leaf.shape))

    return replace(signature, fields=tuple(settled(field, leaf) for field, leaf in pairs))
