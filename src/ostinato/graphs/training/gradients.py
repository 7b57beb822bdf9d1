"""Gradients at fixed addresses.

Note [Gradients]
Without accumulation a recorded step creates its gradients anew, as an eager one does after `zero_grad`. Those
of the graph recorded first, the largest, are kept and become the gradients of the parameters. Smaller graphs
copy theirs there, each as soon as it is made: all at once they would take as much memory again. With
accumulation, gradients have their own memory and every graph adds to it.

Note [Gradients of others]
Parameters that the optimizer lacks may have another one (centers of a loss, the biases beside Muon). They get
what `backward` would give them: an eager step adds to their gradients, and a replay, whose own memory is
reused, leaves copies that are added behind it. Their owner clears them, as without graphs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ..capturing.gate import is_recording
from ..errors import CaptureError, ConfigError


class Gradients:
    """The gradients of some parameters."""

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        *,
        others: Sequence[torch.Tensor] = (),
        accumulate: bool,
    ) -> None:
        """`others`: parameters whose gradients belong to someone else, see Note [Gradients of others]."""
        self._named, self._others = named, list(others)
        self._lasting: set[torch.Tensor] = set()
        """Of others, those that outlive a step."""
        self._is_looked_for = False
        self._accumulate = accumulate
        self._static: dict[torch.Tensor, torch.Tensor] = {}
        self._left: dict[torch.Tensor, torch.Tensor] | None = None
        """What graphs leave for parameters of others; None before the first trial."""
        self.is_trial = False
        """Whether steps are being tried or recorded, so that all of them must give the same gradients."""

    @property
    def present(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters with a gradient, and the gradient."""
        return [(p, p.grad) for _, p in self._named if p.grad is not None]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All that a loss gives gradients to, as far as known."""
        return [*(parameter for _, parameter in self._named), *self._others]

    def tensors(self) -> list[torch.Tensor]:
        """The gradients."""
        return [gradient for _, gradient in self.present]

    def begin(self) -> None:
        """Before the first micro-batch of an update: discard existing gradients, for example those of another
        step that trains the same parameters."""
        if self._accumulate and self._static:
            torch._foreach_zero_(list(self._static.values()))
            for parameter, static in self._static.items():
                parameter.grad = static
        if self._accumulate:
            self._forget_where(lambda parameter: parameter not in self._static or not parameter.requires_grad)

    def forget(self) -> None:
        """Remove the gradient of every parameter."""
        self._forget_where(lambda parameter: True)

    def _forget_where(self, is_meant: Callable[[torch.Tensor], bool]) -> None:
        for _, parameter in self._named:
            if is_meant(parameter):
                parameter.grad = None

    def forget_passing(self) -> None:
        """Until a graph is recorded, gradients lie at temporary addresses: drop them to save memory."""
        if not self._static:
            self.forget()

    def attach(self) -> None:
        """Before a micro-batch: put gradients at their addresses, whatever `zero_grad` or the user did."""
        for parameter, static in self._static.items():
            given = parameter.grad
            if given is static or (given is None and not parameter.requires_grad):  # frozen: left alone
                continue
            if self._accumulate:
                static.zero_() if given is None else static.copy_(given)
            parameter.grad = static

    def settle(self) -> None:
        """After an update made eagerly, or tried: from now on gradients stay where they are put here."""
        if self._accumulate and not self._static:
            wanted = [(p, gradient) for p, gradient in self.present if p.requires_grad]
            self._static = {parameter: gradient.clone() for parameter, gradient in wanted}
            for parameter, static in self._static.items():
                parameter.grad = static

    def leave_the_pool(self, *, is_accumulating: bool) -> None:
        """No graph is left: gradients made by one of them go with it, and other parameters may have been
        unfrozen since. `is_accumulating`: gradients are waiting for an update."""
        self._static, self._left = {}, None
        if self._accumulate and is_accumulating:
            self.settle()
        else:
            self.forget()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around a capture: the last update's gradients are there again afterwards, for anyone who reads
        them. Meanwhile they are on the host, because the device has no room for them twice."""
        before = [(parameter, gradient.to("cpu", copy=True)) for parameter, gradient in self.present]
        try:
            yield
        finally:
            for parameter, gradient in before:
                if parameter.grad is None:
                    parameter.grad = gradient.to(parameter.device)
                else:
                    parameter.grad.copy_(gradient)

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of a loss: replacing the last ones, or added to them."""
        if self.is_trial or not self._is_looked_for:
            self._look_for_others(loss)
        with none_yet(self._others) if self.is_trial else nullcontext():
            if self._accumulate:
                self._add(loss)
            else:
                self._replace(loss)
            if self.is_trial:
                self._leave()
        if not self.present:
            raise ConfigError(
                "no parameter of the optimizer has a gradient: check that it is the optimizer of this "
                "model, and that no hook removes its gradients"
            )
        for name, parameter in self._named:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise ConfigError(
                    f"{name} has a sparse gradient, which has no fixed address: use sparse=False"
                )

    def _leave(self) -> None:
        """What a graph has for parameters of others goes where replays leave it."""
        made = [(p, p.grad) for p in self._others if p.grad is not None and p in self._lasting]
        for _, gradient in made:
            if gradient.layout is not torch.strided:
                raise CaptureError(
                    "a parameter that the optimizer lacks has a sparse gradient, which has no fixed address: "
                    "use sparse=False"
                )
        if self._left is None:
            assert not is_recording(), "a trial comes first"
            self._left = {parameter: torch.empty_like(gradient) for parameter, gradient in made}
        if {parameter for parameter, _ in made} != self._left.keys():
            raise CaptureError(
                "a parameter that the optimizer lacks gets a gradient only at some lengths or in some steps, "
                "and another optimizer would skip it without one: a graph cannot decide that"
            )
        with torch.no_grad():
            for parameter, gradient in made:
                self._left[parameter].copy_(gradient)

    def hand_over(self) -> None:
        """Behind a replay: add what it has left for parameters of others."""
        with torch.no_grad():
            for parameter, left in (self._left or {}).items():
                if parameter.grad is None:
                    parameter.grad = left.clone()
                else:
                    parameter.grad.add_(left)

    def _look_for_others(self, loss: torch.Tensor) -> None:
        """Find parameters that only the loss function knows, such as a critic's. A graph would add to the
        very tensors that are their gradients now, and whose memory may be reused when they are gone."""
        known, leaves = set(self.parameters), leaves_behind([loss])
        # A leaf that the step makes for itself (`x.requires_grad_()`) is another one in every step.
        lasting = set(self._others)
        self._lasting.update(x for x in leaves if x in lasting or isinstance(x, torch.nn.Parameter))
        self._others += [leaf for leaf in leaves if leaf not in known]
        self._is_looked_for = True

    def _add(self, loss: torch.Tensor) -> None:
        before = {parameter: static._version for parameter, static in self._static.items()}
        loss.backward()  # type: ignore[no-untyped-call]
        if self.is_trial and not before:  # captured again
            self.settle()
        elif self.is_trial:
            reached = {p for p, version in before.items() if self._static[p]._version != version}
            new = {p for p, _ in self.present if p not in before}
            self._refuse_others(reached | new, set(before))

    def _replace(self, loss: torch.Tensor) -> None:
        self.forget()
        with self._copied_when_made():
            loss.backward()  # type: ignore[no-untyped-call]
        if self.is_trial and self._static:
            self._refuse_others({parameter for parameter, _ in self.present}, set(self._static))
        if not self._static and is_recording():
            self._static = dict(self.present)

    @contextmanager
    def _copied_when_made(self) -> Iterator[None]:
        """A context in which a gradient moves to its address as soon as it is made."""

        def to_its_place(parameter: torch.Tensor) -> None:
            made, static = parameter.grad, self._static[parameter]
            if made is not None and made is not static and made.layout is torch.strided:
                static.copy_(made)
                parameter.grad = static

        handles = [
            parameter.register_post_accumulate_grad_hook(to_its_place)
            for parameter in self._static
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _refuse_others(self, got: set[torch.Tensor], expected: set[torch.Tensor]) -> None:
        differs = got ^ expected
        if differs:
            name = next(name for name, parameter in self._named if parameter in differs)
            raise CaptureError(
                f"{name} gets a gradient only at some lengths or in some steps, and an optimizer skips "
                f"parameters without one: a graph cannot decide that"
            )


@contextmanager
def none_yet(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """A context in which these begin without a gradient; afterwards they have their own again."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


@contextmanager
def without_hooks(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """A context for asking for gradients of these without calling their hooks: autograd calls those after it
    has stored the gradients."""
    kept = [(hooks, dict(hooks)) for p in parameters if (hooks := p._backward_hooks)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)


def leaves_behind(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that autograd would give gradients to."""
    found, ahead = [], [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(ahead)
    while ahead:
        node: Any = ahead.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        new = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= new
        ahead += new
    return found
