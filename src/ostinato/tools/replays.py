"""Replays single graphs of an engine by themselves, to measure the device's part of a step."""

import statistics

import torch

from ostinato.engine.stepping.model_runner import ModelRunner
from ostinato.graphs import CapturedGraph, CudaGraphRunner

from .timing import device_us

_ROUNDS = 7


def filled_graph(graphs: CudaGraphRunner, batch: int, query_len: int) -> CapturedGraph:
    """The graph for this many requests of this many tokens, without adapters; its inputs are the rows that
    were used last. Call only inside `runner.unchanged()`: replays advance rows that belong to no request."""
    key = next(
        key
        for key in graphs.graphs
        if (key.descriptor.num_reqs, key.descriptor.query_len, key.descriptor.lora) == (batch, query_len, 0)
    )
    graphs.buffers.fill_padding(key.descriptor)
    rows = graphs.buffers.views(key.descriptor)["req_rows"]
    rows.copy_(torch.arange(1, batch + 1, device=rows.device))
    return graphs.graphs[key]


def replay_us(
    runner: ModelRunner, graphs: CudaGraphRunner, batch: int, query_len: int = 1, *, context: int = 64
) -> float:
    """Microseconds per replay, back to back, by the device's clock, starting from contexts of this length."""
    times = []
    with runner.unchanged():
        graph = filled_graph(graphs, batch, query_len)
        for _ in range(_ROUNDS):
            runner.lengths[1 : batch + 1] = context
            times.append(device_us(lambda: graphs.launch(graph), runner.config.device, repeats=8, rounds=1))
    return statistics.median(times)
