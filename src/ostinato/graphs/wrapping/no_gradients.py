"""Results of a module in training mode: whoever differentiates through them is told what to use instead."""

from typing import Any

import torch

from ..errors import ConfigError
from ..trees import map_tensors


def would_be_differentiated(function: Any) -> bool:
    """Whether results of the function itself, called now, would have gradients."""
    if not (isinstance(function, torch.nn.Module) and function.training and torch.is_grad_enabled()):
        return False
    return any(parameter.requires_grad for parameter in function.parameters())


def refusing_backward(results: Any) -> Any:
    """The same results; `backward` through them raises an error that names the calls for training."""
    asks = torch.zeros((), requires_grad=True)

    def refuse(tensor: torch.Tensor) -> Any:
        return _Refusal.apply(tensor, asks) if tensor.is_floating_point() else tensor  # type: ignore[no-untyped-call]

    return map_tensors(refuse, results)


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, asks: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ConfigError(
            "graphed() serves inference, its results carry no gradients. To train from graphs use "
            "ostinato.graphs.graphed_train_step, a whole step, or ostinato.graphs.make_graphed_callables, "
            "parts of a model; to infer, call eval() or work under torch.no_grad()"
        )
