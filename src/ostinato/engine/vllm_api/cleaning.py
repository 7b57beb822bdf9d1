"""Freeing memory between two models in one process."""

from __future__ import annotations

import gc

import torch


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Give the memory of models that nobody holds any more back to the device.

    There is no distributed environment to clean up; with `shutdown_ray` there is nothing to do either.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
