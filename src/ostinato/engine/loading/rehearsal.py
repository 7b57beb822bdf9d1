"""Before the KV cache is there: compile what steps need, and find out what their graphs will take.

Runs on a GPU only, against a KV cache of two pages. Nothing of it stays but compiled kernels and a number.
"""

from __future__ import annotations

import gc

import torch

from ostinato.cache.kv import KVCache
from ostinato.graphs import GraphKey
from ostinato.kernels.compile_ahead import compiling_only

from ..sampling.sampler import Sampler
from ..stepping.model_runner import ModelRunner
from ..stepping.times import StartupTimes
from .device_memory import DeviceMemory
from .load import LoadedModel, kv_shape

_BYTES_PER_GRAPH = 1 << 20
"""What a graph takes outside the pool, at most."""
_SAMPLING_BYTES = 512 << 20


def rehearse(loaded: LoadedModel, times: StartupTimes) -> int:
    """Compile the kernels of all graphs; the bytes that graphs and buffers will take, 0 if nobody asks."""
    if loaded.config.device.type != "cuda":
        return 0
    taken = _rehearse(loaded, times)
    with times.phase("kv"):
        # A runner and its graphs know each other, and what they hold must be gone before anything is sized.
        gc.collect()
        torch.cuda.empty_cache()
    return taken


def _rehearse(loaded: LoadedModel, times: StartupTimes) -> int:
    config = loaded.config
    gc.collect()  # what goes meanwhile would make the buffers look smaller
    before = DeviceMemory.now(config.device)
    with times.phase("compile"):
        kv = KVCache(kv_shape(loaded.model, config), 2, config.device)
        runner = ModelRunner(loaded.model, kv, loaded.attention, config, adapters=loaded.adapters)
        sampler = Sampler(runner) if loaded.model.config.has_lm_head else None
        buffers = DeviceMemory.now(config.device).less(before).allocated
        _compile(runner, sampler)
    if config.config.num_pages is not None:
        return 0
    with times.phase("kv"):
        # The engine will make these buffers again, behind its KV cache.
        return buffers + _trial_capture(runner)


def _compile(runner: ModelRunner, sampler: Sampler | None) -> None:
    done = set()
    with compiling_only(runner.lengths.device), runner.model.one_layer_of_each_kind():
        for key in runner.graphs.keys:
            kernels = runner.kernels_of(key)
            if kernels not in done:
                done.add(kernels)
                runner.graphs.try_out(key)
        if sampler is not None:
            sampler.try_out()


def _trial_capture(runner: ModelRunner) -> int:
    """Capture the largest graph of each kind, count, and drop them."""
    before = DeviceMemory.now(runner.config.device)
    largest: dict[tuple[object, ...], GraphKey] = {}
    for key in runner.graphs.keys:
        graph = key.descriptor
        largest.setdefault((key.mode, graph.is_uniform, graph.cascade, graph.lora), key)
    count = len(runner.graphs.keys)
    runner.capture(StartupTimes(), keys=list(largest.values()), progress=False)
    grown = DeviceMemory.now(runner.config.device).less(before)
    runner.graphs.drop()
    runner.rows.drop()
    # Smaller graphs fit into the memory of the largest; each still takes something outside the pool.
    return grown.taken + count * _BYTES_PER_GRAPH + _SAMPLING_BYTES
