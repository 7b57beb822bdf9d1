"""An optimizer whose step can be part of a graph: its state and learning rates keep their addresses.

Note [Skipped updates]
An update is skipped on the device, without the host's knowledge. Fused optimizers do that themselves
(`found_inf`). For others everything they write is saved before and restored if the flag says so: a copy of
parameters and state in the pool, where activations are no longer needed by then. Trial runs set the flag, so
that they leave parameters and state unchanged without a copy outside the pool.

Note [Updates behind the graph]
A graph has the numbers of an optimizer's groups baked in, except the learning rate. If such a number changes
(`OneCycleLR` and `CyclicLR` cycle betas or momentum), or if an optimizer counts in Python, reads values back,
or has its own hooks, the graph ends with the gradients, clipped and judged, and the optimizer's step runs
eagerly after it.

Note [Numbers stay numbers]
Learning rates on the device, and the flags that make a step fit into a graph, are in the groups only while
the optimizer's own code runs for one. Whoever reads a group, hooks of its steps included, finds what the user
put there: it may be collected, written to a log, compared, or saved.

Note [Memory that stays]
The first update runs eagerly. What stays of it, the optimizer's state and accumulated gradients, would lie
scattered over the memory that its activations have left, and none of that could be released. The allocator
keeps streams' memory apart: so what stays is made on the stream of captures, in memory of its own.
"""

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from numbers import Real
from typing import Any
from weakref import WeakMethod, finalize

import torch
from torch.optim import optimizer as torch_optimizer

from ..backends import backend_for
from ..capturing.gate import is_recording
from ..errors import CaptureError, ConfigError
from ..wrapping.standing import Comparison
from .rates import Rates
from .torchs_optimizers import capturable_on_a_cpu, counting_in_float64

logger = logging.getLogger("ostinato.graphs")

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_DOUBLE = (torch.float64, torch.complex128)
_HOOKS_OF_STEPS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum"}
"""What schedulers keep in a group, and optimizers do not read."""
_FLAGS = ("capturable", "fused", "foreach")
"""What a group has as a graph needs it while a step is made for one, besides the rate."""


class StaticOptimizer:
    """Wraps a user's optimizer, which stays the user's: see Note [Numbers stay numbers]."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"optimizer must be a torch.optim.Optimizer, not a {type(optimizer).__name__}")
        if not hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):
            raise ConfigError(
                f"{type(optimizer).__name__} was not initialised by torch's Optimizer: call "
                f"super().__init__(param_groups, defaults) in its __init__"
            )
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(
                f"{type(optimizer).__name__} recomputes the loss through a closure, which a captured "
                f"step cannot do"
            )
        self._optimizer = optimizer
        self._device = device
        self._is_fused = _can_be_fused(optimizer)
        self._rates = Rates(optimizer, self._rate_type, device)
        self._lent: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        """While it steps for a graph: each group, what it holds for that, and what the user's are."""
        self._keeps_rates = False
        """Whether it finds learning rates as the user gave them, even if it steps for a graph."""
        self.has_stepped = False
        """Whether the state that the optimizer creates in its first step exists."""
        self.moves_parameters = False
        """Whether parameters have other memory after its first step (`p.data = ...`)."""
        self._placed: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._still: Callable[[], bool] = lambda: True
        self._baked: list[dict[str, Any]] | None = None
        self._is_static = self.is_known
        """Whether its numbers are on the device, so that its step can be recorded."""
        self.why_behind: str | None = None
        """Why its step runs after the graphs, if it does; see Note [Updates behind the graph]."""
        kind = type(optimizer)
        if kind.__module__.startswith("torch.optim") and not (
            self.is_known or "capturable" in self._groups[0]
        ):
            self.step_behind(
                f"{kind.__name__} reads values back to the host and is not capturable", static=False
            )
        self.prepare()
        after_load = WeakMethod(self._after_load)  # the optimizer outlives training steps
        hook = optimizer.register_load_state_dict_post_hook(lambda loaded: _called(after_load, loaded))
        finalize(self, hook.remove)

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        """The user's optimizer."""
        return self._optimizer

    @property
    def _rate_type(self) -> torch.dtype:
        """Of rates on the device: fused kernels accept only one type."""
        if self._is_fused:
            return torch.float64 if self._device.type == "cpu" else torch.float32
        return self._count_type

    @property
    def _count_type(self) -> torch.dtype:
        """Of step counts on the device. Eager optimizers compute with them, and with rates, in Python's
        float64, which shows if one of their parameters is as exact."""
        return torch.float64 if self.has_doubles and not self._is_fused else torch.float32

    @property
    def has_doubles(self) -> bool:
        """Whether one of its parameters is as exact as a number in Python."""
        return any(each.dtype in _DOUBLE for each in self.parameters)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters, in the order of their groups."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    @property
    def members(self) -> list[list[int]]:
        """Which parameters are in which group."""
        return [[*map(id, group["params"])] for group in self._optimizer.param_groups]

    def note(self) -> None:
        """Record the present groups and state as those that graphs have."""
        self._baked = [*map(_numbers, self._with_numbers)]
        self._note_places()

    def moved_numbers(self) -> list[str]:
        """The names of numbers in the groups that differ from the graphs' values."""
        pairs = zip(self._baked or (), self._with_numbers, strict=False)
        return [
            name
            for baked, group in pairs
            for name, value in baked.items()
            if (now := group.get(name)) is not value and now != value
        ]

    def step_behind(self, why: str, *, static: bool) -> None:
        """From now on its step is in no graph. `static`: it could be, and decides on the device."""
        self.why_behind = why
        if not static and self._is_static:
            self._is_static = self._is_fused = False
            self._placed = []
        logger.warning(
            "the optimizer's step runs after the graph of forward and backward, not in it: %s", why
        )

    def step_inside(self) -> bool:
        """Put its step back into the graphs, unless the reason against it is lasting; True if it did."""
        comes_back = self.why_behind is not None and self._is_static and not self.hooks
        if comes_back:
            self.why_behind = None
        return comes_back

    def tell_schedulers(self) -> None:
        """It has stepped, if in a replay: a scheduler created since would warn that it has not."""
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    @property
    def hooks(self) -> bool:
        """Whether there are hooks around its steps, or around those of all optimizers."""
        of_all = torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
        return bool(of_all or any(getattr(self._optimizer, name) for name in _HOOKS_OF_STEPS))

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """A context in which its steps are trials, without calling hooks."""
        optimizer: Any = self._optimizer
        before = {name: getattr(optimizer, name) for name in _HOOKS_OF_STEPS}
        for name in _HOOKS_OF_STEPS:
            setattr(optimizer, name, OrderedDict())
        try:
            yield
        finally:
            for name, hooks in before.items():
                setattr(optimizer, name, hooks)

    @property
    def is_known(self) -> bool:
        """Whether it is of a kind whose step is known to fit into a graph."""
        kind = type(self._optimizer)
        can = "capturable" in self._groups[0]
        plain = not any(_has_tensor_betas(g) or g.get("foreach") is False for g in self._groups)
        return self._is_fused or (can and plain and kind.__module__.startswith("torch.optim"))

    @contextmanager
    def rates_as_numbers(self) -> Iterator[None]:
        """A context for trials with learning rates as the user gave them."""
        self._keeps_rates = True
        try:
            yield
        finally:
            self._keeps_rates = False

    def become_static(self) -> None:
        """From now on its numbers are on the device."""
        self._is_static = True
        self.prepare()
        self._note_places()

    @property
    def _with_numbers(self) -> list[dict[str, Any]]:
        """Its groups, and its own attributes that torch's optimizers do not have."""
        own = [(k, v) for k, v in vars(self._optimizer).items() if not k.startswith("_")]
        return [{k: v for k, v in own if isinstance(v, bool | int | float | str)}, *self._groups]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def prepare(self) -> None:
        """Put learning rates and step counts on the device."""
        if not self._is_static:
            return
        self._rates.send()
        for group in self._groups:
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter, {})
                step = state.get("step")
                if isinstance(step, torch.Tensor) and "capturable" in group:
                    state["step"] = step.to(parameter.device, self._count_type)
        # It would warn that a capturable optimizer runs outside a graph.
        self._optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]

    def take_rates(self) -> None:
        """Take the learning rates of the next step from the groups."""
        self._rates.refuse_new_groups()
        if self._is_static:
            self._rates.send()

    def set_rates(self, wanted: float | Sequence[float]) -> None:
        """Take the learning rates of the next step from a schedule."""
        self._rates.refuse_new_groups()
        self._rates.set(wanted)
        if self._is_static:
            self._rates.send()

    def step(self, skip: torch.Tensor) -> None:
        """One update of all parameters that have a gradient, unless `skip` (1.0 or 0.0, on the device)."""
        optimizer: Any = self._optimizer
        if not self.has_stepped:
            # Eagerly: state created here begins as the optimizer defines, or not yet at all.
            if not bool(skip):
                backend = backend_for(self._device)
                backend.release_unused()
                addresses = [p.data_ptr() for p in self.parameters]
                with backend.stream():  # see Note [Memory that stays]
                    self._step()
                self.moves_parameters = addresses != [p.data_ptr() for p in self.parameters]
                self.has_stepped = True
                self._note_places()
            return
        if not self._is_static:  # its count in Python must advance only if it steps
            if not bool(skip):
                self._step()
            return
        before = self._python_state() if is_recording() else None
        if self._is_fused:
            optimizer.found_inf, optimizer.grad_scale = skip, None
            try:
                self._step()
            finally:
                del optimizer.found_inf, optimizer.grad_scale
        else:
            changing = self.changing()
            saved = [torch.empty_like(tensor) for tensor in changing]
            torch._foreach_copy_(saved, changing)
            self._step()
            for tensor, value in zip(changing, saved, strict=True):
                tensor.copy_(torch.where(skip != 0, value, tensor))
        if before is not None:
            self._refuse_what_a_graph_cannot_keep(before)

    def _step(self) -> None:
        is_capturable = self._is_static and not self._is_fused
        counts_wide = is_capturable and self.is_known and self._count_type is torch.float64
        with (
            torch.no_grad(),
            counting_in_float64(self._optimizer) if counts_wide else nullcontext(),
            capturable_on_a_cpu() if is_capturable and self._device.type == "cpu" else nullcontext(),
            self._stepping_for_a_graph() if self._is_static else nullcontext(),
        ):
            self._optimizer.step()

    @contextmanager
    def _stepping_for_a_graph(self) -> Iterator[None]:
        """A context for one step: see Note [Numbers stay numbers]."""
        # The last hook before it, and the first one after it.
        optimizer: Any = self._optimizer
        has_hooks = self.hooks
        lending = optimizer.register_step_pre_hook(lambda *_: self._lend(are_new=has_hooks))
        taking = optimizer.register_step_post_hook(lambda *_: self._take_back())
        optimizer._optimizer_step_post_hooks.move_to_end(taking.id, last=False)
        try:
            yield
        finally:
            lending.remove()
            taking.remove()
            self._take_back()

    def _lend(self, *, are_new: bool) -> None:
        if are_new and not is_recording():  # a hook may have set them
            self._rates.send()
        for group, rate in zip(self._groups, self._rates.in_place_of(self._groups), strict=True):
            lent: dict[str, Any] = dict(self._flags_for_a_graph(group))
            if rate is not None and not self._keeps_rates:
                lent["lr"] = rate
            self._lent.append((group, lent, {name: group[name] for name in lent}))
            group.update(lent)

    def _flags_for_a_graph(self, group: dict[str, Any]) -> Iterator[tuple[str, bool]]:
        if self._is_fused:
            yield from (("fused", True), ("foreach", False))
        elif "capturable" in group and group.get("foreach") is None and "foreach" in group:
            yield "foreach", True  # only these accept a learning rate on the device
        if "capturable" in group:
            yield "capturable", True

    def _take_back(self) -> None:
        lent, self._lent = self._lent, []
        is_assigned = False
        for group, there, users in lent:
            now: Any = group.get("lr")
            group.update(users)
            if "lr" in there and now is not there["lr"]:
                is_assigned = True
                if not is_recording():
                    group["lr"] = float(now) if isinstance(users.get("lr"), Real) else now
        if is_assigned and is_recording():
            raise CaptureError(
                f"{type(self._optimizer).__name__} sets its learning rate itself, in Python: a graph would "
                f"repeat one step forever"
            )

    def changing(self) -> list[torch.Tensor]:
        """What a step writes: parameters with a gradient, and the optimizer's state."""
        with_gradient = [p for p in self.parameters if p.grad is not None]
        return [*with_gradient, *(tensor for _, _, tensor in self._entries())]

    def _entries(self) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
        for parameter in self.parameters:
            state = self._optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield state, key, value

    def _note_places(self) -> None:
        self._placed = list(self._entries()) if self._is_static else []
        comparison = Comparison()
        comparison.add_places(self._placed)
        state_of, parameters = self._optimizer.state.get, self.parameters
        comparison.add_equal(lambda: list(map(state_of, parameters)))
        self._still = comparison.compiled()

    def moved(self) -> list[str]:
        """State that has moved, by name."""
        if not self._placed or self._still():
            return []
        held = {id(state) for state in self._optimizer.state.values()}
        return [
            f"the optimizer's {key}"
            for state, key, value in self._placed
            if id(state) not in held or state.get(key) is not value
        ]

    def notice_cleared_state(self) -> None:
        """If its state was cleared, start over, as an eager optimizer does."""
        if self._placed and not any(map(self._optimizer.state.get, self.parameters)):
            self.has_stepped, self._placed = False, []

    def addresses(self) -> list[torch.Tensor]:
        """The state that graphs were captured with."""
        return [tensor for _, _, tensor in self._placed]

    @contextmanager
    def undone_in_python(self) -> Iterator[None]:
        """A context after which state and groups hold the objects that they hold now."""
        states = {p: dict(self._optimizer.state[p]) for p in self.parameters if p in self._optimizer.state}
        groups = [dict(group) for group in self._optimizer.param_groups]
        try:
            yield
        finally:
            for parameter, held in states.items():
                self._optimizer.state[parameter].clear()
                self._optimizer.state[parameter].update(held)
            for group, before in zip(self._optimizer.param_groups, groups, strict=True):
                group.update(before)

    def _python_state(self) -> list[tuple[Any, ...]]:
        numbers = [item for group in self._optimizer.param_groups for item in _numbers(group).items()]
        return numbers + [
            (key, value.data_ptr(), value.device) if isinstance(value, torch.Tensor) else (key, repr(value))
            for parameter in self.parameters
            for key, value in self._optimizer.state.get(parameter, {}).items()
        ]

    def _refuse_what_a_graph_cannot_keep(self, before: list[tuple[Any, ...]]) -> None:
        now, name = self._python_state(), type(self._optimizer).__name__
        changed = next((new[0] for old, new in zip(before, now, strict=False) if old != new), None)
        if changed is None:
            changed = next((key for _, key, value in self._entries() if self._rates.holds(value)), None)
        if changed is not None or len(before) != len(now):
            raise CaptureError(
                f"{name} keeps {changed or 'state'} in Python or in a tensor created anew in every step: a "
                f"graph would repeat one step forever. Keep it in tensors that are changed in place"
            )
        self.refuse_state_elsewhere()

    def refuse_state_elsewhere(self) -> None:
        """Raises CaptureError if its state is not all on the device."""
        elsewhere = next((key for _, key, value in self._entries() if value.device != self._device), None)
        if elsewhere is not None:
            raise CaptureError(
                f"{type(self._optimizer).__name__} keeps {elsewhere} on the host, where a graph cannot "
                f"change it: use a capturable one"
            )

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        """Move loaded values to where graphs look for them."""
        if not self._rates.is_of_all_groups:  # it no longer steps
            return
        self.prepare()
        if self._placed:
            self._restore(self._placed)

    def _restore(self, old: list[tuple[dict[str, Any], str, torch.Tensor]]) -> None:
        entries = list(self._entries())
        same = len(entries) == len(old) and all(
            key == old_key and value.shape == tensor.shape
            for (_, key, value), (_, old_key, tensor) in zip(entries, old, strict=True)
        )
        if not same:  # for example from before the first step: start over
            self.has_stepped = False
            self._placed = []
            return
        with torch.no_grad():
            for (state, key, value), (_, _, tensor) in zip(entries, old, strict=True):
                tensor.copy_(value)
                state[key] = tensor
        self._note_places()


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    left_out = {"params", "lr", *_FLAGS, *_OF_SCHEDULERS}
    return {k: v for k, v in group.items() if k not in left_out and not isinstance(v, torch.Tensor)}


def _can_be_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is of a fused kind and the user chose no other."""
    return type(optimizer) in _FUSED and all(
        group["fused"] is not False
        and group["foreach"] is None
        and not group.get("differentiable")
        and not _has_tensor_betas(group)
        and all(parameter.is_floating_point() for parameter in group["params"])
        for group in optimizer.param_groups
    )


def _has_tensor_betas(group: dict[str, Any]) -> bool:
    """Such betas are read on the device by some kinds of an optimizer, on the host by others."""
    return any(isinstance(beta, torch.Tensor) for beta in group.get("betas", ()))


def _called(method: WeakMethod[Any], optimizer: torch.optim.Optimizer) -> None:
    found = method()
    if found is not None:
        found(optimizer)
