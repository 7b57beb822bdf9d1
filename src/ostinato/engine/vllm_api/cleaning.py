"""Freeing memory between two models in one process."""

from __future__ import annotations

import gc

import torch


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Return the memory of models that nothing references any more to the device.

    There is no distributed environment to clean up, so `shutdown_ray` has no effect.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
