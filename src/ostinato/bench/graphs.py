"""`ostinato bench graphs`: the cost of a replay, against eager and against torch's own ways to use graphs."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Group
from rich.table import Table

from ostinato.graphs import (
    BatchDescriptor,
    CudaGraphRunner,
    Field,
    GraphKey,
    GraphMode,
    InputBuffers,
    Ladder,
    Results,
    graphed,
)

from ..tools.machine import machine
from ..tools.timing import device_us, host_us, wall_us

CHAIN_LENGTHS = (50, 500, 2000)
LONGEST_COMPILED_CHAIN = 500
"""Inductor fuses a chain into one kernel, which takes minutes for longer ones."""


CHAIN_WIDTHS = (32, 1024)
"""Numbers per op: tiny, and small."""


def chain(length: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of `length` small dependent ops, one kernel each."""

    def run(x: torch.Tensor) -> torch.Tensor:
        for i in range(length):
            x = x * 1.0001 if i % 2 else x + 0.5
        return x

    return run


def bench_chains(device: torch.device, lengths: Sequence[int] = CHAIN_LENGTHS) -> list[dict[str, Any]]:
    """Eager against replay for chains of small ops."""
    return [_bench_chain(device, length, width) for width in CHAIN_WIDTHS for length in lengths]


def _bench_chain(device: torch.device, length: int, width: int) -> dict[str, Any]:
    function = chain(length)
    x = torch.randn(1, width, device=device)
    f = graphed(function, ladder=[1])
    f.capture(x)
    graph = f.graph_call.graphs()[0]
    expected = function(x)
    assert torch.equal(f(x), expected), "the replayed chain differs from eager"
    with torch.no_grad():
        eager = wall_us(lambda: function(x), device, repeats=3)
    row: dict[str, Any] = {
        "ops": length,
        "width": width,
        "nodes": graph.recorded.nodes,
        "eager_us": eager,
        "replay_device_us": device_us(graph.replay, device),
        "replay_host_us": host_us(graph.replay, device, burst=20),
        "call_wall_us": wall_us(lambda: f(x), device),
        "capture_ms": graph.recorded.seconds * 1e3,
        "bytes": graph.recorded.bytes,
    }
    row["replay_us_per_node"] = row["replay_device_us"] / length
    row["gain"] = eager / row["call_wall_us"]
    if device.type == "cuda":
        row |= _peers(function, length, x, expected, device)
    return row


def _peers(
    function: Callable[..., Any], length: int, x: torch.Tensor, expected: torch.Tensor, device: torch.device
) -> dict[str, Any]:
    """The same chain through torch's own two ways to use graphs."""
    results: dict[str, Any] = {}
    graphed_callable: Any = torch.cuda.make_graphed_callables(function, (x,))
    assert torch.equal(graphed_callable(x), expected)
    results["make_graphed_callables_us"] = wall_us(lambda: graphed_callable(x), device)
    if length > LONGEST_COMPILED_CHAIN:
        return results | {"reduce_overhead_us": None, "reduce_overhead_compile_s": None}
    with torch.no_grad():
        compiled = torch.compile(function, mode="reduce-overhead", dynamic=False)
        started = time.perf_counter()
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            result = compiled(x)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)

        def step() -> None:
            torch.compiler.cudagraph_mark_step_begin()
            compiled(x)

        return results | {"reduce_overhead_us": wall_us(step, device), "reduce_overhead_compile_s": seconds}


def four_inputs_runner(device: torch.device, ladder: Ladder) -> CudaGraphRunner:
    """A step with the four small inputs of a decode step."""
    fields = [
        Field("input_ids", torch.int64, per="request", sample=(0, 100)),
        Field("positions", torch.int64, per="request", sample=(0, 100)),
        Field("seq_lens", torch.int32, per="request", pad=1, sample=(1, 100)),
        Field("slots", torch.int64, per="request", sample=(0, 100)),
    ]

    def step(
        input_ids: torch.Tensor, positions: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        return input_ids + positions * seq_lens + slots

    buffers = InputBuffers(fields, max_tokens=ladder.limit, device=device)
    keys = [GraphKey(GraphMode.FULL, BatchDescriptor.decode(size)) for size in ladder]
    return CudaGraphRunner(step, buffers, keys, results=Results.UNGUARDED)


def bench_run(device: torch.device, batch_size: int = 5) -> dict[str, float]:
    """CPU microseconds of `run()` over a bare replay, with inputs on the host and on the device."""
    runner = four_inputs_runner(device, Ladder([1, 2, 4, 8, 16, 32]))
    runner.capture(progress=False)
    runner.verify()
    host = {
        "input_ids": torch.arange(batch_size),
        "positions": torch.arange(batch_size),
        "seq_lens": torch.ones(batch_size, dtype=torch.int32),
        "slots": torch.arange(batch_size),
    }
    resident = {name: value.to(device) for name, value in host.items()}
    graph = runner.graphs[next(key for key in runner.keys if key.descriptor.num_reqs == 8)]
    exact = {name: value[:8] for name, value in _stretched(resident, 8).items()}
    bare = host_us(graph.replay, device)
    costs = {
        "bare_replay_us": bare,
        "run_host_inputs_us": host_us(lambda: runner.run(host), device),
        "run_numpy_inputs_us": host_us(lambda: runner.run({n: v.numpy() for n, v in host.items()}), device),
        "run_device_inputs_us": host_us(lambda: runner.run(resident), device),
        "run_device_inputs_no_padding_us": host_us(lambda: runner.run(exact), device),
        "decide_us": host_us(lambda: runner.decide(runner.buffers.shape_of(host)), device),
    }
    costs |= {
        "over_replay_host_us": costs["run_host_inputs_us"] - bare,
        "over_replay_device_us": costs["run_device_inputs_us"] - bare,
    }
    return costs


def _stretched(batch: dict[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
    return {name: value.repeat(-(-size // len(value))) for name, value in batch.items()}


def bench_capture(device: torch.device) -> dict[str, Any]:
    """Time and memory to capture a ladder for a small model, graph by graph."""
    model = torch.nn.Sequential(
        *[layer for _ in range(8) for layer in (torch.nn.Linear(1024, 1024), torch.nn.GELU())]
    ).to(device)
    f = graphed(model, ladder=Ladder.sglang(256))
    started = time.perf_counter()
    report = f.capture(torch.randn(1, 1024, device=device))
    seconds = time.perf_counter() - started
    f.verify()
    return {
        "graphs": len(report.graphs),
        "total_s": seconds,
        "recording_ms_per_graph": report.capture_ms / len(report.graphs),
        "pool_bytes": report.pool_bytes,
        "bytes_per_graph": [row.bytes for row in report.graphs],
    }


def bench_graphs(device: torch.device) -> dict[str, Any]:
    """All measurements, as one result."""
    with torch.no_grad():
        return {
            "benchmark": "graphs",
            "machine": machine(),
            "device": str(device),
            "run": bench_run(device),
            "capture": bench_capture(device),
            "chains": bench_chains(device),
        }


def as_tables(result: dict[str, Any]) -> Group:
    """The result as tables."""
    chains = Table(title=f"chains of small ops on {result['device']}, microseconds", title_justify="left")
    headings = {
        "ops": "ops",
        "width": "width",
        "eager_us": "eager",
        "call_wall_us": "graphed",
        "gain": "gain",
        "replay_device_us": "replay (device)",
        "replay_us_per_node": "per op",
        "replay_host_us": "replay (CPU)",
        "make_graphed_callables_us": "make_graphed_callables",
        "reduce_overhead_us": "compile reduce-overhead",
        "capture_ms": "capture ms",
        "bytes": "bytes",
    }
    for heading in headings.values():
        chains.add_column(heading, justify="right")
    for row in result["chains"]:
        chains.add_row(*(_cell(row.get(key)) for key in headings))
    costs = Table(title="CPU microseconds per step", title_justify="left")
    costs.add_column("what")
    costs.add_column("us", justify="right")
    for name, value in result["run"].items():
        costs.add_row(name, f"{value:.1f}")
    capture = result["capture"]
    line = (
        f"{capture['graphs']} graphs in {capture['total_s']:.2f} s "
        f"({capture['recording_ms_per_graph']:.2f} ms recording each), pool {capture['pool_bytes']:,} bytes"
    )
    return Group(chains, costs, line)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
