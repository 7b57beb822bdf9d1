"""Results that would have gradients without graphs: differentiating through them raises an error that says
what to use instead."""

from operator import attrgetter
from typing import Any

import torch

from ..errors import ConfigError
from ..trees import map_tensors, tensors_in

_requires_grad = attrgetter("requires_grad")


class _Parameters:
    """The parameters of a module as they were, and whether there may be others now."""

    def __init__(self, module: torch.nn.Module) -> None:
        inside = [vars(each) for each in module.modules()]
        self._tables = [table for own in inside for table in (own["_parameters"], own["_modules"])]
        self._sizes = list(map(len, self._tables))
        self._tensors = list(module.parameters())
        self._wanted: torch.Tensor | None = None

    def are_all(self) -> bool:
        return self._sizes == list(map(len, self._tables))

    def first_wanted(self) -> torch.Tensor | None:
        """One that requires a gradient."""
        if self._wanted is None or not self._wanted.requires_grad:
            self._wanted = next(filter(_requires_grad, self._tensors), None)
        return self._wanted


class Differentiated:
    """Tells with respect to what results of a function could be differentiated without graphs."""

    def __init__(self, function: Any) -> None:
        self._module = function if isinstance(function, torch.nn.Module) else None
        self._parameters: _Parameters | None = None

    def by(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Arguments that require gradients, and one parameter of a module, be it in training mode or not: a
        backbone in eval mode may be fine-tuned."""
        if not torch.is_grad_enabled():
            return []
        given = (*args, *kwargs.values())
        plain = all(isinstance(value, torch.Tensor) for value in given)
        found = [tensor for tensor in (given if plain else tensors_in(given)) if tensor.requires_grad]
        wanted = self._wanted_parameter()
        return found if wanted is None else [*found, wanted]

    def _wanted_parameter(self) -> torch.Tensor | None:
        if self._module is None:
            return None
        wanted = None if self._parameters is None else self._parameters.first_wanted()
        if wanted is None and (self._parameters is None or not self._parameters.are_all()):
            self._parameters = _Parameters(self._module)
            wanted = self._parameters.first_wanted()
        return wanted


def refusing_backward(results: Any, by: list[torch.Tensor]) -> Any:
    """The same results; `backward` through those without gradients raises an error that names the calls for
    training."""

    def refuse(tensor: torch.Tensor) -> Any:
        if tensor.requires_grad or not tensor.is_floating_point():
            return tensor
        return _Refusal.apply(tensor, *by)  # type: ignore[no-untyped-call]

    return map_tensors(refuse, results)


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *by: torch.Tensor) -> torch.Tensor:
        return tensor.data  # no view, which could not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ConfigError(
            "graphed() is for inference: its results carry no gradients. To train from graphs use "
            "ostinato.graphs.graphed_train_step for a whole step, or ostinato.graphs.make_graphed_callables "
            "for parts of a model. For inference run under torch.no_grad(); where something else in the loss "
            "is trained, also freeze the parameters with requires_grad_(False), and detach() the arguments"
        )
