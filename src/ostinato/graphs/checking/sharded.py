"""Models whose parameters are spread over devices: told by name, before anything is tried.

Such a model gathers its parameters in every call, at other addresses each time, and a trial that is undone
leaves it in a state that it cannot go on from.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch


def why_sharded(modules: Iterable[torch.nn.Module]) -> str | None:
    """Why no graph can run these modules: one is sharded, or copied to other devices in every call."""
    distributed = sys.modules.get("torch.distributed.fsdp")
    sharded: Any = getattr(distributed, "FullyShardedDataParallel", ())
    for module in modules:
        if isinstance(module, sharded):
            return (
                "FullyShardedDataParallel gathers parameters in every call and frees them again, but a graph "
                "needs them at fixed addresses: use DistributedDataParallel, or no graph"
            )
        if isinstance(module, torch.nn.DataParallel) and len(module.device_ids) > 1:
            return (
                "DataParallel copies the model to every device in every call, which no graph can repeat: use "
                "DistributedDataParallel, one process for each device"
            )
        for name, parameter in vars(module).get("_parameters", {}).items():
            if type(parameter).__name__ == "DTensor":
                return (
                    f"{name} of a {type(module).__name__} is a DTensor, as fully_shard (FSDP2) and tensor "
                    f"parallelism make: it is gathered in every call, at another address each time, but a "
                    f"graph needs fixed ones. Use DistributedDataParallel, or no graph"
                )
    return None
