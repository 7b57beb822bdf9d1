"""The weights of a model as tensors that others may train, at the same addresses."""

import torch
from torch import Tensor

from .transformer import Transformer
from .weights import checkpoint_tensors


def shared_weights(model: Transformer) -> dict[str, Tensor]:
    """Every weight under its checkpoint name, over the model's own memory.

    Ordinary tensors, whatever mode the model was created in: autograd may save them, optimizers may write
    them.
    """
    with torch.inference_mode(False), torch.no_grad():
        return {
            name: torch.empty(0, dtype=view.dtype, device=view.device).set_(
                view.untyped_storage(), int(view.storage_offset()), view.size(), view.stride()
            )
            for name, view in checkpoint_tensors(model).items()
        }
