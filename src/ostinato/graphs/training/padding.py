"""Whether a loss is the same with padding after a batch as without. If not, nothing is padded.

Note [What a loss does not show]
A model at the start of training may return the same whatever its inputs: its last layer is zero, or small.
What it learns depends on padding all the same, so gradients are compared too, by their norms. So is what a
step writes to buffers and other tensors: a codebook that follows its use, a count of positions.

Note [Terms that are switched off]
A term whose weight is zero, to be warmed up later, does not show at all. If the weight is in a tensor of a
few numbers, the trial is repeated with one in its place. A weight that is a number in Python is baked in:
when it changes and graphs are captured again, padding is tried again.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch

from ..backends import Backend
from ..capturing.trial import Change, Trials
from ..checking.differences import difference, difference_as_a_whole
from ..dispatching.descriptor import BatchDescriptor, BatchShape
from ..errors import CaptureError
from ..inputs.buffers import Batch, InputBuffers
from ..journal import WriteJournal
from ..options import CaptureOptions
from ..trees import map_tensors, tensors_in
from ..trimming import Trimmer, same_constant
from ..wrapping.effects import Effects, Stepped
from . import other_optimizers
from .apart import ModelAndLoss
from .batches import IGNORED, LENGTH_DIM, BatchKind
from .gradients import leaves_behind, none_yet
from .ignored_targets import why_not_ignored
from .loss import Loss, Returned
from .places import Written, writing_lines, written_by
from .wrapped import without_reduction

logger = logging.getLogger("ostinato.graphs")

_AT_ONE_SHAPE = {torch.float32: 1e-5, torch.float64: 1e-9}
_AT_TWO_SHAPES = 0.03
"""A mean that counts padding is off by more, another order of additions by much less."""
_OF_NORMS = 1e-4
"""For gradients at one shape, in float32: padding that does not count adds zeros to sums."""
_FEW = 8
"""Positions with which a loss function is tried on the host."""
_FEW_NUMBERS = 8
"""In a tensor that may hold the weights of terms."""


class PaddingTrial:
    """Runs the loss of the first batch in a few ways, without a trace."""

    def __init__(
        self,
        loss: Loss,
        state: Mapping[str, torch.Tensor],
        backend: Backend,
        options: CaptureOptions,
        reached: Sequence[torch.Tensor] = (),
        find_effects: Callable[[Callable[[], WriteJournal]], Effects] = lambda run: Effects(),
    ) -> None:
        """`reached`: the tensors that model and loss function use. `find_effects`: finds out, by more runs,
        what they leave in Python."""
        self._loss, self._reached = loss.uncompiled(), reached
        self._state, self._backend, self._options = state, backend, options
        self._find_effects, self.effects = find_effects, Effects()
        self._constants: dict[str, Any] = {}
        self._has_results = False
        self.why_no_graph: str | None = None
        """Why no graph can return what the loss function does, if so."""
        self.results = Trimmer(LENGTH_DIM)
        """Which positions of what the loss function returns are real."""
        self.written = Written({}, ())
        """What model and loss function write when they run, besides the state."""
        self._trials = self._new_trials()

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The device's generators that the step draws from, besides the default one."""
        own = [g for g in self.written.generators if g.device.type == self._loss.device.type]
        return tuple(dict.fromkeys([*self._options.generators, *own]))

    def _new_trials(self) -> Trials:
        state = {**self._state, **self.written.tensors}
        generators = tuple(dict.fromkeys([*self._options.generators, *self.written.generators]))
        return Trials(self._backend, state=state, generators=generators)

    def kind_of(self, inputs: Any, targets: Any) -> tuple[BatchKind, str | None]:
        """How batches like this one are padded, and why they cannot be, or None."""
        takes_mask = self._loss.takes_mask
        plain = BatchKind(inputs, targets, target_pad=0, with_length=takes_mask)
        batch, length = plain.matched(inputs, targets)
        per_position, refusal = self._look(plain, batch, length)
        self.effects = self._find_effects(lambda: self._journal_of_step(plain, batch))
        masked = takes_mask or per_position
        kind = BatchKind(inputs, targets, target_pad=0 if masked else IGNORED, with_length=masked)
        if masked or refusal is None:
            try:
                batch, length = kind.matched(inputs, targets)
                refusal = self._why_not(kind, batch, length) or self._why_not_later(kind, batch, length)
            except Exception as error:
                refusal = f"the model or the loss fails at another length ({type(error).__name__}: {error})"
        return kind, refusal

    def _look(self, kind: BatchKind, batch: Batch, length: int) -> tuple[bool, str | None]:
        """Whether the loss has a value per position; why it cannot handle ignored targets, or None."""
        tensors = {name: tensor.to(self._loss.device, copy=True) for name, tensor in batch.items()}

        def look(differentiate: bool = False) -> tuple[bool, str | None]:
            inputs, targets = kind.arguments(tensors)
            with torch.enable_grad():  # for models that differentiate, or hook their results
                outputs = self._loss.outputs(inputs)
                returned = self._loss.raw(outputs, targets, kind.mask(tensors))
            self._note_results(returned)
            loss = returned.loss
            del returned
            if differentiate:
                self._differentiate(loss)
            if self._loss.takes_mask or loss.dim() > 0:
                return loss.dim() > 0, None
            del loss
            few = self._of_few_positions(kind, tensors, length)
            return False, why_not_ignored(self._loss.loss_fn, *(few or (outputs, targets)))

        own = [*self._state.values(), *tensors.values()]
        self.written = self._quietly(lambda: written_by(lambda: look(True), besides=own))
        self._trials = self._new_trials()
        before = {name: tensor._version for name, tensor in tensors.items()}
        found: tuple[bool, str | None] = self._quietly(look)
        changed = [name for name, tensor in tensors.items() if tensor._version != before[name]]
        if changed:
            lines = self._quietly(lambda: writing_lines(look, {name: tensors[name] for name in changed}))
            logger.warning(
                "a step changes %s in place, but in a copy: the tensors that it is given stay unchanged. "
                "Keep what steps update in a buffer%s",
                ", ".join(changed),
                f" (at {'; '.join(lines.values())})" if lines else "",
            )
        return found

    def _note_results(self, returned: Returned) -> None:
        """A replay returns the Python values of the capture."""
        constants = {name: leaf for name, leaf in returned.results if not isinstance(leaf, torch.Tensor)}
        for name, value in constants.items():
            before = self._constants.get(name, value)
            if not same_constant(before, value):
                self.why_no_graph = (
                    f"{name}, which the loss function returns, is a Python value that differs from call to "
                    f"call, and a replay would return that of the capture: return a tensor, or leave it "
                    f"out (of the outputs of transformers, return loss and logits)"
                )
        self._constants, self._has_results = constants, bool(returned.results)

    def written_at(self, kind: BatchKind, length: int) -> Written:
        """What a run writes at this length, besides the state."""
        batch = kind.dummy(BatchDescriptor(length, 1))
        tensors = {name: tensor.to(self._loss.device, copy=True) for name, tensor in batch.items()}

        def look() -> None:
            with torch.enable_grad():
                loss = self._loss_of(kind, tensors)
            self._differentiate(loss)

        own = [*self._state.values(), *tensors.values()]
        found: Written = self._quietly(lambda: written_by(look, besides=own))
        return found

    def journal_of(self, kind: BatchKind, batch: Batch) -> WriteJournal:
        """The journal of a run of model and loss function, as far as it may be watched."""
        tensors = {name: tensor.to(self._loss.device, copy=True) for name, tensor in batch.items()}
        journal = WriteJournal()

        def watched() -> None:
            with journal, torch.enable_grad():
                self._loss_of(kind, tensors)

        with suppress(Exception):
            self._quietly(watched)
        return journal

    def _journal_of_step(self, kind: BatchKind, batch: Batch) -> WriteJournal:
        """The same with the backward pass, and what hooks of gradients do in it."""
        tensors = {name: tensor.to(self._loss.device, copy=True) for name, tensor in batch.items()}
        journal = WriteJournal()

        def watched() -> None:
            with journal:
                with torch.enable_grad():
                    loss = self._loss_of(kind, tensors)
                self._differentiate(loss)

        try:
            with suppress(Exception):
                self._quietly(watched)
        finally:
            journal.undo()
        return journal

    def _of_few_positions(self, kind: BatchKind, tensors: Batch, length: int) -> tuple[Any, Any] | None:
        """The model's outputs at the first few positions, and their targets, if model and loss accept so few:
        all outputs of a language model would be gigabytes on the host."""
        if length <= _FEW:
            return None
        inputs, targets = kind.arguments(kind.part(tensors, 0, _FEW))
        try:
            outputs = self._loss.outputs(inputs)
            self._loss.raw(outputs, targets, None)
        except Exception:
            return None
        return outputs, targets

    def _why_not_later(self, kind: BatchKind, batch: Batch, length: int) -> str | None:
        """See Note [Terms that are switched off]."""
        off = {tensor: tensor.detach().clone() for tensor in self._reached if _is_off(tensor)}
        given = {name: _switched_on(tensor) for name, tensor in batch.items() if _is_off(tensor)}
        if not off and not given:
            return None
        before = self._trials
        try:
            with torch.no_grad():
                for tensor in off:
                    tensor.copy_(_switched_on(tensor))
            self._trials = self._new_trials()
            refusal = self._why_not(kind, {**batch, **given}, length)
        finally:
            self._trials = before
            with torch.no_grad():
                for tensor, was in off.items():
                    tensor.copy_(was)
        return refusal and f"once tensors that are zero now are not, {refusal}"

    def _why_not(self, kind: BatchKind, batch: Batch, length: int) -> str | None:
        """Tried with one half of the batch, and the other half as padding."""
        if length < 2:
            batch, length = kind.dummy(BatchDescriptor(2, 1)), 2
        real = length // 2
        buffers = InputBuffers(kind.fields, max_tokens=length, max_reqs=1, device=self._loss.device)
        shape, descriptor = BatchShape(real, 1), BatchDescriptor(length, 1)
        short = kind.part(batch, 0, real)

        def padded(given: Batch | None = None, *, poison: bool = False) -> _Seen:
            buffers.fill(given or short, shape, descriptor, poison=poison)
            return self._seen(kind, buffers.views(descriptor))

        one = self._quietly(padded)
        if not one.loss.isfinite():  # for example prompts, which have no targets
            short = kind.part(batch, length - real, real)
            one = self._quietly(padded)
        if not one.loss.isfinite():
            return f"the loss of half a batch is {one.loss}, so padding could not be tried"
        other = self._quietly(lambda: padded(poison=True))
        tolerance = _AT_ONE_SHAPE.get(one.loss.dtype, 1e-2)
        if not _close(one.loss, other.loss, tolerance):
            return f"the loss depends on what padding holds ({one.loss:.6g} or {other.loss:.6g})"
        if not one.has_gradients_of(other, max(tolerance, _OF_NORMS)):
            return "what the model learns depends on what padding holds"
        if (name := one.writes_otherwise(other, max(tolerance, _OF_NORMS))) is not None:
            return f"what is written to {name} depends on what padding holds"
        if (name := self._left_otherwise(one, other, max(tolerance, _OF_NORMS), real)) is not None:
            return f"what is left in {name} depends on what padding holds"
        same = kind.alike(short) if one.changes else None  # extrema show nothing that lies between them
        if same is not None:
            one = self._quietly(lambda: padded(same))
            other = self._quietly(lambda: padded(same, poison=True))
            if (name := one.writes_otherwise(other, max(tolerance, _OF_NORMS))) is not None:
                return f"what is written to {name} depends on what padding holds"
        with evaluating(self._loss.modules), torch.backends.cudnn.flags(enabled=False):
            with_it = self._quietly(padded)
            alone = buffers.on_device(short, shape)
            without = self._quietly(lambda: self._seen(kind, alone))
            buffers.fill(short, shape, descriptor)
            apart = ModelAndLoss(
                self._loss,
                kind,
                buffers.views(descriptor),
                alone,
                (length, real),
                has_results=self._has_results,
            )
            what_counts = self._quietly(apart.why_not_padded)
        if not _close(with_it.loss, without.loss, _AT_TWO_SHAPES):
            return f"the loss is {without.loss:.6g} without padding and {with_it.loss:.6g} with it"
        if not with_it.has_gradients_of(without, _AT_TWO_SHAPES):
            return "what the model learns differs with padding and without"
        if (name := with_it.writes_otherwise(without, _AT_TWO_SHAPES)) is not None:
            return f"what is written to {name} differs with padding and without"
        if (name := self._left_otherwise(with_it, without, _AT_TWO_SHAPES, real)) is not None:
            return f"what is left in {name} differs with padding and without"
        if same is not None:
            with evaluating(self._loss.modules), torch.backends.cudnn.flags(enabled=False):
                with_it, alone = self._quietly(lambda: padded(same)), buffers.on_device(same, shape)
                without = self._quietly(lambda: self._seen(kind, alone))
            if (name := with_it.writes_otherwise(without, _AT_TWO_SHAPES)) is not None:
                return f"what is written to {name} differs with padding and without"
        if what_counts:
            return str(what_counts)
        try:
            self.results.check()
        except CaptureError as error:
            return str(error)
        return None

    def _seen(self, kind: BatchKind, tensors: Mapping[str, torch.Tensor]) -> "_Seen":
        """The loss, and what would be learnt from it."""
        with self.effects.noted() as left:
            loss, norms, whole = self._learnt(kind, tensors)
        left = map_tensors(torch.Tensor.detach, left)
        self.effects.let_go()
        if self._has_results or left:
            length = kind.length_of(tensors)
            self.results.observe(BatchDescriptor(length, 1), Stepped(whole, left) if left else whole)
        return _Seen(loss, norms, self._trials.changes(), map_tensors(torch.clone, left))

    def _learnt(
        self, kind: BatchKind, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """The loss, the norms of gradients, and what the loss function returns."""
        with torch.enable_grad():
            returned = self._loss.returned(*kind.arguments(tensors), kind.mask(tensors))
            loss = returned.loss.clone()
        whole = returned.handed_out(torch.Tensor.detach)
        del returned
        own, parameters = self._parameters_behind(loss)
        if not loss.requires_grad or any(p._post_accumulate_grad_hooks for p in parameters):
            if self.effects:
                self._differentiate(loss)
            return loss.detach(), torch.zeros(0, device="cpu"), whole  # such hooks may train
        with none_yet(parameters):
            loss.backward()  # type: ignore[no-untyped-call]
            norms = [torch.zeros((), device="cpu"), *(_norm(parameter.grad) for parameter in own)]
        return loss.detach(), torch.stack(norms), whole

    def _left_otherwise(self, one: "_Seen", other: "_Seen", tolerance: float, real: int) -> str | None:
        """The name of a place where one leaves something different from the other at real positions."""
        for place, here, there in zip(self.effects.names, one.left, other.left, strict=True):
            for a, b in zip(tensors_in(here), tensors_in(there), strict=False):
                if a.dim() > LENGTH_DIM and a.size(LENGTH_DIM) >= real <= b.size(LENGTH_DIM):
                    a, b = (each.narrow(LENGTH_DIM, 0, real) for each in (a, b))
                if a.shape == b.shape and difference(a, b) > tolerance:
                    return place
        return None

    def _differentiate(self, loss: torch.Tensor) -> None:
        """For the other effects of gradient hooks. What fails here fails in the real step too."""
        _, parameters = self._parameters_behind(loss)
        with suppress(Exception), none_yet(parameters), other_optimizers.refused(lambda: parameters):
            with torch.enable_grad():
                total = loss.sum()
            total.backward()  # type: ignore[no-untyped-call]

    def _parameters_behind(self, loss: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Those of the modules, and all that get a gradient, for example also a critic's."""
        found = [p for module in self._loss.modules for p in module.parameters()]
        own: list[torch.Tensor] = [p for p in found if p.requires_grad]
        return own, list(dict.fromkeys([*own, *leaves_behind([loss])]))

    def _loss_of(self, kind: BatchKind, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._loss(*kind.arguments(tensors), kind.mask(tensors)).clone()

    def _quietly(self, step: Callable[[], Any]) -> Any:
        with torch.no_grad(), without_reduction(self._loss.modules):
            return self._trials.run(step)


class _Seen(NamedTuple):
    """For one batch: the loss, the norms of gradients, and what was written, by name."""

    loss: torch.Tensor
    norms: torch.Tensor
    changes: dict[str, Change]
    left: list[Any]
    """What is left in Python."""

    def has_gradients_of(self, other: "_Seen", tolerance: float) -> bool:
        """Compared as a whole: gradients that are zero up to rounding differ in all digits."""
        return difference_as_a_whole(self.norms, other.norms) <= tolerance

    def writes_otherwise(self, other: "_Seen", tolerance: float) -> str | None:
        """A place where one leaves something different from the other, or None."""
        for name in self.changes.keys() | other.changes.keys():
            one, two = self.changes.get(name), other.changes.get(name)
            if one is None or two is None or difference(one.after, two.after, one.before) > tolerance:
                return name.partition(".")[2] or "a tensor that is not a buffer"
        return None


def _is_off(tensor: torch.Tensor) -> bool:
    is_plain = tensor.is_floating_point() and not tensor.requires_grad and not tensor.is_inference()
    return is_plain and 0 < tensor.numel() <= _FEW_NUMBERS and bool((tensor == 0).any())


def _switched_on(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.masked_fill(tensor == 0, 1)


def _norm(gradient: torch.Tensor | None) -> torch.Tensor:
    if gradient is None:
        return torch.zeros((), device="cpu")
    dense = gradient.to_dense()
    return (dense.abs() if dense.is_complex() else dense).float().norm().cpu()


@contextmanager
def evaluating(roots: list[torch.nn.Module]) -> Iterator[None]:
    """A context without dropout and the like."""
    modules = [module for root in roots for module in root.modules()]
    before = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training


def _close(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    return bool(torch.isclose(one, other, rtol=tolerance, atol=tolerance * 1e-2, equal_nan=True))
