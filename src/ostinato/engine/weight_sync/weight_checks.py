"""Inspecting weights: single values, checksums of all of them, a comparison with an earlier state."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from ostinato.models.transformer import Transformer
from ostinato.models.weights import checkpoint_tensors

from .errors import TransferError

ACTIONS = ("checksum", "snapshot", "compare", "reset_tensors")
_AT_ONCE = 2**24
_MOST_VALUES = 2**20
"""Returned for one weight."""
_ODD = -7046029254386353131
"""2**64 divided by the golden ratio, as a signed number."""


class WeightChecks:
    """Checks of one model's weights, by their names in the checkpoint."""

    def __init__(self, model: Transformer, apply: Any) -> None:
        self._model, self._apply = model, apply
        self._snapshot: dict[str, Tensor] | None = None

    def values(self, weight: str, count: int) -> list[Any]:
        """The first `count` rows of a weight, or elements of a vector."""
        view = self._views.get(weight)
        if view is None:
            view = self._views.get(f"model.{weight}")
        if view is None:
            raise TransferError(f"unknown weight {weight!r}")
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise TransferError(f"truncate_size must be an integer of at least 1, not {count!r}")
        width = math.prod(view.shape[1:])
        if min(count, view.shape[0]) * width > _MOST_VALUES:
            raise TransferError(
                f"too many values: truncate_size can be at most {_MOST_VALUES // width} for this weight"
            )
        found: list[Any] = view[:count].float().cpu().tolist()
        return found

    def run(self, action: str) -> dict[str, Any]:
        """The answer of SGLang's `/weights_checker`. The values of checksums are our own."""
        match action:
            case "checksum":
                return {"success": True, "message": "Success.", **self._sums()}
            case "snapshot":
                self._snapshot = {name: view.to("cpu", copy=True) for name, view in self._views.items()}
                return {"success": True, "message": "Success."}
            case "compare":
                return self._compared()
            case "reset_tensors":
                return self._reset()
        raise TransferError(f"unknown action {action!r}: use {', '.join(ACTIONS)}")

    @property
    def _views(self) -> dict[str, Tensor]:
        return checkpoint_tensors(self._model)

    def _compared(self) -> dict[str, Any]:
        if self._snapshot is None:
            raise TransferError("there is nothing to compare with: take a snapshot first")
        kept = self._snapshot
        differ = [name for name, view in self._views.items() if not _same(view, kept[name])]
        if differ:
            more = f" and {len(differ) - 4} more" if len(differ) > 4 else ""
            return {"success": False, "message": f"weights differ: {', '.join(differ[:4])}{more}"}
        return {"success": True, "message": "Success."}

    def _reset(self) -> dict[str, Any]:
        """Random numbers in place of all weights, to show whether an update writes every one of them."""
        generator = torch.Generator().manual_seed(0)
        random = ((name, torch.rand(view.shape, generator=generator)) for name, view in self._views.items())
        self._apply(random, None)
        return {"success": True, "message": "Success."}

    def _sums(self) -> dict[str, Any]:
        sums = {name: checksum(view) for name, view in self._views.items()}
        whole = hashlib.sha256()
        for name in sorted(sums):
            whole.update(f"{name}{sums[name]}".encode())
        info = {
            f"{kind}_{what}": at for kind in ("tp", "dp", "pp") for what, at in (("rank", 0), ("size", 1))
        }
        rank = {
            "checksums": sums,
            "per_gpu_checksum": whole.hexdigest(),
            "parallelism_info": {**info, "rank": 0, "size": 1},
        }
        return {
            "ranks": [rank],
            "per_engine_checksum": hashlib.sha256(whole.hexdigest().encode()).hexdigest(),
        }


def checksum(tensor: Tensor) -> str:
    """A checksum of the bits and their order; the same on every device."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for at, part in enumerate(tensor.reshape(-1).split(_AT_ONCE)):
        places = torch.arange(1, part.numel() + 1, device=tensor.device) + at * _AT_ONCE
        # Integers wrap around at 64 bits, so the order of additions does not matter.
        mixed = (part.view(bits).long() + places) * _ODD
        total += ((mixed ^ (mixed >> 29)) * places).sum()
    return f"{int(total) & (2**64 - 1):016x}"


def _same(view: Tensor, kept: Tensor) -> bool:
    bits = {2: torch.int16, 4: torch.int32}[view.element_size()]
    return torch.equal(view.cpu().contiguous().view(bits), kept.contiguous().view(bits))
