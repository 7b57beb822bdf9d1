"""Copies of what a program sees, and how two of them differ."""

import dataclasses
import enum
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

OF_MODULES = set(nn.Module().__dict__) - {"training"}
"""Attributes of every module, which are compared in a form of their own."""

TOLERANCES = {
    torch.float64: 1e-8,
    torch.complex128: 1e-8,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
"""Of the largest element, by type. Others: `FLOAT32`."""
FLOAT32 = 1e-4


@dataclasses.dataclass
class Kept:
    """An object with parts, copied."""

    kind: str
    parts: dict[Any, Any]


def snapshot(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Returns a copy of `value` that later changes do not reach."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | enum.Enum):
        return value
    if isinstance(value, torch.dtype | torch.device | torch.Size | range | slice | type):
        return str(value)
    if id(value) in above:
        return "itself"
    above = (*above, id(value))
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            return Kept(str(value.layout), {"dense": value.detach().to_dense().cpu().clone()})
        return value.detach().resolve_conj().resolve_neg().cpu().clone()
    if isinstance(value, np.ndarray | np.generic):
        return torch.from_numpy(np.array(value))
    if isinstance(value, nn.Module):
        own = {k: v for k, v in value.__dict__.items() if k not in OF_MODULES and not k.startswith("_")}
        for held in (value._parameters, value._buffers, value._modules):
            own.update(held)
        return Kept(type(value).__name__, {k: snapshot(v, above) for k, v in own.items()})
    if isinstance(value, Mapping):
        return Kept(type(value).__name__, {k: snapshot(v, above) for k, v in value.items()})
    if isinstance(value, set | frozenset):
        return Kept(type(value).__name__, dict(enumerate(sorted(value, key=repr))))
    if isinstance(value, Sequence) or type(value).__name__ == "deque":
        return Kept(type(value).__name__, {i: snapshot(v, above) for i, v in enumerate(value)})
    if isinstance(value, BaseException):
        return Kept(type(value).__name__, {"says": str(value)})
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return value.__name__
    own = getattr(value, "__dict__", None)
    if own is None:
        own = {name: getattr(value, name) for name in getattr(value, "__slots__", ()) if hasattr(value, name)}
    return Kept(type(value).__name__, {k: snapshot(v, above) for k, v in own.items()})


def difference(ours: Any, eager: Any, where: str = "") -> str | None:
    """Names the first difference beyond rounding between two snapshots; None if there is none."""
    if isinstance(ours, torch.Tensor) and isinstance(eager, torch.Tensor):
        return _of_tensors(ours, eager, where)
    if type(ours) is not type(eager):
        return f"{where}: {_short(ours)} instead of {_short(eager)}"
    if isinstance(ours, Kept):
        if ours.kind != eager.kind:
            return f"{where}: a {ours.kind} instead of a {eager.kind}"
        if list(ours.parts) != list(eager.parts) and set(ours.parts) != set(eager.parts):
            return f"{where}: {_short(list(ours.parts))} instead of {_short(list(eager.parts))}"
        found = (difference(ours.parts[k], eager.parts[k], f"{where}.{k}") for k in eager.parts)
        return next((one for one in found if one is not None), None)
    if isinstance(ours, float):
        same = ours == eager or (math.isnan(ours) and math.isnan(eager))
        same = same or math.isclose(ours, eager, rel_tol=FLOAT32, abs_tol=1e-6)
        return None if same else f"{where}: {ours} instead of {eager}"
    return None if ours == eager else f"{where}: {_short(ours)} instead of {_short(eager)}"


def _of_tensors(ours: torch.Tensor, eager: torch.Tensor, where: str) -> str | None:
    if ours.dtype != eager.dtype or ours.shape != eager.shape:
        kinds = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (ours, eager)]
        return f"{where}: {kinds[0]} instead of {kinds[1]}"
    if eager.numel() == 0:
        return None
    if not (eager.is_floating_point() or eager.is_complex()):
        wrong = ours != eager
    else:
        share = TOLERANCES.get(eager.dtype, FLOAT32)
        wide = torch.complex128 if eager.is_complex() else torch.float64
        ours, eager = ours.to(wide), eager.to(wide)
        finite = eager[eager.isfinite()].abs()
        scale = finite.max().item() if finite.numel() else 0.0
        wrong = ~torch.isclose(ours, eager, rtol=share, atol=share * scale + 1e-7, equal_nan=True)
    if not wrong.any():
        return None
    place = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{where}: {int(wrong.sum())} of {wrong.numel()} elements differ, "
        f"{ours[place].item():.6g} instead of {eager[place].item():.6g} at {list(place)}"
    )


def _short(value: Any) -> str:
    text = f"a {value.kind}" if isinstance(value, Kept) else repr(value)
    return text if len(text) < 200 else f"{text[:197]}..."
