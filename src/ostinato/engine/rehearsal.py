"""Before the KV cache is there: compile what steps need, and find out what their graphs will take.

Runs on a GPU only, against a KV cache of two pages. Nothing of it stays but compiled kernels and a number.
"""

from __future__ import annotations

import torch

from ostinato.cache.kv import KVCache
from ostinato.graphs import GraphKey
from ostinato.kernels import request_rows
from ostinato.kernels.compile_ahead import compiling_only

from .device_memory import DeviceMemory
from .loading import LoadedModel, kv_shape
from .model_runner import ModelRunner
from .sampler import Sampler
from .times import StartupTimes

_BYTES_PER_GRAPH = 1 << 20
"""What a graph takes outside the pool, at most."""
_SAMPLING_BYTES = 512 << 20


def rehearse(loaded: LoadedModel, times: StartupTimes) -> int:
    """Compile the kernels of all graphs; the bytes that graphs will take, 0 where nobody needs to know."""
    config = loaded.config
    if config.device.type != "cuda":
        return 0
    with times.phase("compile"):
        kv = KVCache(kv_shape(loaded.model, config), 2, config.device)
        runner = ModelRunner(loaded.model, kv, loaded.attention, config)
        _compile(runner)
    if config.config.num_pages is not None:
        return 0
    with times.phase("kv"):
        taken = _trial_capture(runner)
        del runner, kv
        torch.cuda.empty_cache()
    return taken


def _compile(runner: ModelRunner) -> None:
    # The one kernel that others get indices from has to run.
    rows = torch.zeros(1, dtype=torch.int32, device=runner.lengths.device)
    request_rows.begin_decode(rows, runner.lengths, runner.last_tokens, runner.began)
    done = set()
    with compiling_only(runner.lengths.device):
        for key in runner.graphs.keys:
            kernels = runner.kernels_of(key)
            if kernels not in done:
                done.add(kernels)
                runner.graphs.try_out(key)
        if runner.model.config.has_lm_head:
            Sampler(runner).try_out()


def _trial_capture(runner: ModelRunner) -> int:
    """Capture the largest graph of each kind, count, and drop them."""
    before = DeviceMemory.now(runner.config.device)
    largest: dict[tuple[object, bool], GraphKey] = {}
    for key in runner.graphs.keys:
        largest.setdefault((key.mode, key.descriptor.is_uniform), key)
    count = len(runner.graphs.keys)
    runner.graphs.keys = tuple(largest.values())
    runner.capture(StartupTimes(), progress=False)
    grown = DeviceMemory.now(runner.config.device).less(before)
    runner.graphs.drop()
    runner.rows.drop()
    # Smaller graphs fit into the memory of the largest; each still takes something outside the pool.
    return grown.taken + count * _BYTES_PER_GRAPH + _SAMPLING_BYTES
