"""What a trainer would give as `worker_extension_cls`."""

from __future__ import annotations

import time
from typing import Any

import torch


class Extension:
    """Reaches for what the classes of OpenRLHF, TRL, verl and prime-rl reach for."""

    communicator: Any = None

    def about(self) -> dict[str, Any]:
        import torch.distributed as dist

        assert isinstance(self.model_runner.model, torch.nn.Module)
        assert self.model_runner.get_model() is self.get_model()
        assert self.vllm_config.model_config.dtype == self.model_config.dtype
        return {
            "rank": dist.get_rank() + self.local_rank,
            "dtype": str(self.model_config.dtype),
            "device": str(self.device),
            "hidden": self.model_runner.model.config.hidden_size,
        }

    def update_weight(self, name: str, dtype: str, shape: list[int], value: float) -> None:
        assert getattr(torch, dtype) == self.model_config.dtype
        weight = torch.full(shape, value, dtype=getattr(torch, dtype), device=self.device)
        self.model_runner.model.load_weights(weights=[(name, weight)])

    def scale_in_place(self, name: str, factor: float) -> None:
        dict(self.model_runner.model.named_parameters())[name].data.mul_(factor)

    def take_long(self, seconds: float) -> str:
        time.sleep(seconds)
        return "late"

    def fail(self) -> None:
        raise KeyError("by itself")


class Clashing:
    """Hides what a worker has."""

    def get_model(self) -> None: ...
