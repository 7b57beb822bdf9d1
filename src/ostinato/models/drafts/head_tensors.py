"""The names of a head's weights in checkpoints, and how they are loaded."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import WeightsError
from ..finite_weights import FiniteCheck, refuse_nonfinite
from ..layers import Linear, RMSNorm
from .checkpoint import Checkpoint
from .eagle3 import Eagle3Head
from .head import Head

OTHER_NAMES: Mapping[str, Mapping[str, str]] = {"eagle": {}, "eagle3": {"layers.0.": "midlayer."}}
"""Some EAGLE-3 checkpoints number their only layer."""
_LAYER = {"eagle": "layers.0", "eagle3": "midlayer"}
_PARTS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_NOT_NEEDED = ("t2d", "d2t")
"""t2d maps the other way; d2t is not needed by a head whose tokens are the target's."""


def head_tensors(head: Head) -> dict[str, Tensor]:
    """Every weight of a head under its checkpoint name, as a view of the parameter that holds it."""
    views: dict[str, Tensor] = {}
    for module_name, module in head.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            names = _stored_names(head.name, module_name)
            is_apart = isinstance(module, Linear) and len(names) > 1
            tensors = parameter.split(list(module.matrix.parts)) if is_apart else (parameter,)
            views |= {f"{name}.{kind}": view for name, view in zip(names, tensors, strict=True)}
    if isinstance(head, Eagle3Head) and head.vocab_size != head.shape.vocab_size:
        views["d2t"] = head.d2t
    return views


def check_head(head: Head, checkpoint: Checkpoint) -> None:
    """Raises WeightsError unless the checkpoint has everything that the head needs, and nothing unknown."""
    wanted = head_tensors(head)
    check_tensors(wanted, checkpoint)
    for name in checkpoint.shapes.keys() - wanted.keys():
        if name not in _NOT_NEEDED and not name.endswith("rotary_emb.inv_freq"):
            raise WeightsError(f"{checkpoint.directory}: tensor {name} has no place in a head of {head.name}")
    if "d2t" in wanted:
        ids = torch.arange(head.vocab_size) + checkpoint.one("d2t", torch.device("cpu"))
        if int(ids.min()) < 0 or int(ids.max()) >= head.shape.vocab_size:
            raise WeightsError(f"{checkpoint.directory}: d2t maps to tokens that the target does not have")


def check_tensors(wanted: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    """Raises WeightsError unless these are in the checkpoint, with their shapes."""
    stored, place = checkpoint.shapes, checkpoint.directory
    if missing := sorted(wanted.keys() - stored.keys()):
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise WeightsError(
            f"{place}: tensors missing from the draft's checkpoint: {', '.join(missing[:4])}{more}"
        )
    for name, tensor in wanted.items():
        if stored[name] != tuple(tensor.shape):
            raise WeightsError(
                f"{place}: tensor {name} has shape {list(stored[name])}, but its config.json and the target "
                f"require {list(tensor.shape)}"
            )


def fill(head: Head, checkpoint: Checkpoint, allow_nonfinite: bool = False) -> None:
    """Copy a checkpoint that `check_head` has accepted into a head, in place."""
    wanted, weight = head_tensors(head), next(head.parameters())
    finite = FiniteCheck(weight.dtype)
    for name, tensor in checkpoint.tensors(weight.device):
        if name in wanted:
            wanted[name].copy_(tensor)
            if tensor.is_floating_point():
                finite.add(name, wanted[name])
    found = ((name, checkpoint.one(name, torch.device("cpu"))) for name in finite.bad())
    place = f"{checkpoint.directory}: "
    refuse_nonfinite(found, weight.dtype, place=place, allowed=allow_nonfinite)


def make_up(head: Head, seed: int) -> None:
    """Fill in random weights that depend only on `seed`, their names and the kind of device."""
    norms = {
        f"{name}.weight"
        for module_name, module in head.named_modules()
        if isinstance(module, RMSNorm)
        for name in _stored_names(head.name, module_name)
    }
    for name, tensor in head_tensors(head).items():
        if name in norms:
            tensor.fill_(1.0)
        elif name != "d2t":
            generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
            tensor.normal_(0.0, 0.02 if tensor.ndim == 1 else tensor.shape[1] ** -0.5, generator=generator)


def _stored_names(method: str, module: str) -> tuple[str, ...]:
    layer = _LAYER[method]
    if module in ("input_layernorm", "hidden_norm"):
        return (f"{layer}.{module}",)
    if not module.startswith("layer."):
        return (module,)
    inside = module.removeprefix("layer.")
    return tuple(f"{layer}.{name}" for name in _PARTS.get(inside, (inside,)))
