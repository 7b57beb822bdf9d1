"""The loss of a micro-batch: model, loss function and autocast, with padding left out."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConfigError
from ..trees import flatten, flatten_with_names
from .batches import LENGTH_DIM


@dataclass(frozen=True)
class Returned:
    """What a loss function returned, perhaps more than the loss."""

    loss: torch.Tensor
    """A number."""
    whole: Any
    """As it was returned."""

    @property
    def results(self) -> list[tuple[str, Any]]:
        """Everything besides the loss, with names."""
        if isinstance(self.whole, torch.Tensor):
            return []
        own = _loss_in(self.whole)
        named = flatten_with_names(self.whole)[0]
        return [(f"result{name}", leaf) for _, name, leaf in named if leaf is not own]

    def handed_out(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """The same structure with the loss detached and every other tensor detached and changed."""
        if isinstance(self.whole, torch.Tensor):
            return self.loss.detach()
        own = _loss_in(self.whole)
        leaves, structure = flatten(self.whole)
        return structure.filled([self._handed_out(leaf, own, change) for leaf in leaves])

    def _handed_out(
        self, leaf: Any, own: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> Any:
        if leaf is own:
            return self.loss.detach()
        return change(leaf.detach()) if isinstance(leaf, torch.Tensor) else leaf


class Loss:
    """`loss(inputs, targets, mask)` is a number. The mask, [batch, length], is None if nothing is padded.

    A loss function may return more than the loss: a tuple or list that begins with it, or a mapping or
    dataclass with an entry `loss`.

    A loss function with a parameter `mask` is given it. If it returns a loss for every position, [batch,
    length], their mean over real positions is taken. Otherwise it returns a number, and must leave out
    targets of -100 by itself, as torch's do.
    """

    def __init__(
        self,
        model: Any,
        loss_fn: Callable[..., Any],
        autocast: torch.dtype | None,
        *,
        compiled: bool = False,
    ) -> None:
        """`compiled`: model and loss function are compiled by torch.compile as one function."""
        self.model, self.loss_fn, self.is_compiled = model, loss_fn, compiled
        self._autocast = autocast
        self.takes_mask = _has_parameter(loss_fn, "mask")
        self.modules = [part for part in (model, loss_fn) if isinstance(part, torch.nn.Module)]
        devices = {tensor.device for module in self.modules for tensor in module.parameters()}
        if len(devices) != 1:
            raise ConfigError(f"a captured step needs a model on one device, not on {len(devices)}")
        self.device = devices.pop()

        if compiled and self.device.type != "cuda":
            raise ConfigError("compile needs a CUDA device: torch.compile is inactive while the tape records")
        self._compute = torch.compile(self._value, dynamic=False) if compiled else self._value

    def __call__(self, inputs: Any, targets: Any, mask: torch.Tensor | None) -> torch.Tensor:
        return self.returned(inputs, targets, mask).loss

    def returned(self, inputs: Any, targets: Any, mask: torch.Tensor | None) -> Returned:
        """The loss, and whatever the loss function returns besides."""
        return Returned(*self._compute(inputs, targets, mask))

    def _value(self, inputs: Any, targets: Any, mask: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
        whole = self._called(self.outputs(inputs), targets, mask)
        return self._mean(_loss_in(whole), mask), whole

    def of_outputs(self, outputs: Any, targets: Any, mask: torch.Tensor | None) -> Returned:
        """The same of the model's outputs."""
        whole = self._called(outputs, targets, mask)
        return Returned(self._mean(_loss_in(whole), mask), whole)

    def _mean(self, loss: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if loss.dim() == 0:
            return loss
        if mask is None:
            return loss.mean()
        if loss.dim() < 2 or loss.size(LENGTH_DIM) != mask.size(1):
            raise ConfigError(
                f"the loss function returned {list(loss.shape)}: return a number, or a loss for every "
                f"position {list(mask.shape)}"
            )
        real = mask.reshape(*mask.shape, *(1,) * (loss.dim() - 2)).expand_as(loss)
        return torch.where(real, loss, 0).sum() / real.sum()

    def uncompiled(self) -> "Loss":
        """The same, before torch.compile: runs at other lengths need not be compiled."""
        model = getattr(self.model, "_orig_mod", self.model)
        loss_fn = getattr(self.loss_fn, "_torchdynamo_orig_callable", self.loss_fn)
        return Loss(model, loss_fn, self._autocast)

    def types(self) -> set[torch.dtype]:
        """The types it computes in, as far as parameters and autocast show."""
        of_parameters = {p.dtype for module in self.modules for p in module.parameters()}
        if torch.float32 in of_parameters and torch.get_float32_matmul_precision() != "highest":
            of_parameters.add(torch.bfloat16)  # with about as few bits
        return of_parameters | ({self._autocast} if self._autocast else set())

    def outputs(self, inputs: Any) -> Any:
        """The model's outputs: a mapping is passed as keywords, a tuple or list as arguments."""
        with self._casting():
            if isinstance(inputs, Mapping):
                return self.model(**inputs)
            return self.model(*inputs) if isinstance(inputs, tuple | list) else self.model(inputs)

    def raw(self, outputs: Any, targets: Any, mask: torch.Tensor | None) -> Returned:
        """What the loss function returns, with the loss as it is there."""
        whole = self._called(outputs, targets, mask)
        return Returned(_loss_in(whole), whole)

    def _called(self, outputs: Any, targets: Any, mask: torch.Tensor | None) -> Any:
        with self._casting():
            more = {"mask": mask} if self.takes_mask else {}
            return self.loss_fn(outputs, targets, **more)

    def _casting(self) -> AbstractContextManager[Any]:
        kind = self.device.type
        # Its cache begins empty and is emptied at the end: no cast weight outlives a step.
        return torch.autocast(
            kind, dtype=self._autocast, enabled=self._autocast is not None, cache_enabled=True
        )


def _loss_in(whole: Any) -> torch.Tensor:
    """The loss in what a loss function returned."""
    if isinstance(whole, torch.Tensor):
        return whole
    if isinstance(whole, Mapping):
        loss = whole.get("loss")
    elif isinstance(whole, tuple | list):
        loss = whole[0] if whole else None
    else:
        loss = getattr(whole, "loss", None) if hasattr(type(whole), "__dataclass_fields__") else None
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"the loss function returned a {type(whole).__name__} without a loss that is a tensor: return "
            f"the loss, or a tuple that begins with it, or a dictionary or dataclass with an entry 'loss'"
        )
    return loss


def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        return name in inspect.signature(target).parameters
    except (TypeError, ValueError):
        return False
