"""Results that would have gradients without graphs: differentiating through them raises an error that says
what to use instead."""

from typing import Any

import torch

from ..errors import ConfigError
from ..trees import map_tensors, tensors_in


def differentiated(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors with respect to which results of the unwrapped function could be differentiated: arguments that
    require gradients, and one parameter of a module in training mode."""
    if not torch.is_grad_enabled():
        return []
    given = (*args, *kwargs.values())
    plain = all(isinstance(value, torch.Tensor) for value in given)
    by = [tensor for tensor in (given if plain else tensors_in(given)) if tensor.requires_grad]
    if isinstance(function, torch.nn.Module) and function.training:
        by += [parameter for parameter in function.parameters() if parameter.requires_grad][:1]
    return by


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
            "for parts of a model. For inference, call eval() and detach() the arguments, or run under "
            "torch.no_grad()"
        )
