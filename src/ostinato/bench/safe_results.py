"""What it costs that results are the caller's own: results copied behind the replay, guarded, and unguarded.

python -m ostinato.bench.safe_results benchmarks/results/safe-results-h200.json

One output of so many bytes, from 1 KB to 100 MB, of one row and of 256: microseconds of the CPU and of the
device for a call. Then a steady call of a model of 12 layers, against a bare replay of its graph. `--small`
is for a machine without a GPU.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ostinato.graphs import (
    BatchDescriptor,
    CaptureOptions,
    CudaGraphRunner,
    Field,
    GraphKey,
    GraphMode,
    InputBuffers,
    Results,
    graphed,
)

from ..tools.machine import machine
from ..tools.results import write_json
from ..tools.timing import device_us, host_us

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 10 << 20, 100 << 20)
BATCHES = (1, 256)
LAYERS = 12


def bench_output(device: torch.device, nbytes: int, batch: int) -> dict[str, Any]:
    """One output of so many bytes, that one kernel writes."""
    columns = max(1, nbytes // 4 // batch)
    weight = torch.randn(columns, device=device)
    row: dict[str, Any] = {"bytes": columns * 4 * batch, "batch": batch}
    burst = 100 if nbytes <= 1 << 20 else 5
    for kind in Results:
        runner = CudaGraphRunner(
            lambda x: x * weight,
            InputBuffers([Field("x", torch.float32, (1,))], max_tokens=batch, device=device),
            [GraphKey(GraphMode.FULL, BatchDescriptor.decode(batch))],
            options=CaptureOptions(freeze_gc=False),
            results=kind,
        )
        runner.capture(progress=False)
        inputs = {"x": torch.randn(batch, 1, device=device)}
        assert torch.equal(runner.run(inputs), inputs["x"] * weight)
        call = partial(runner.run, inputs)
        row[f"{kind}_host_us"] = host_us(call, device, burst=burst, bursts=9)
        row[f"{kind}_device_us"] = device_us(call, device, repeats=burst)
    return row


def bench_model(device: torch.device, batch: int, width: int, results: str, *, grad: bool) -> dict[str, Any]:
    """A steady call of an encoder of 12 layers: the CPU's microseconds over a bare replay."""
    layer = torch.nn.TransformerEncoderLayer(
        width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )
    model = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).to(device).eval()
    f = graphed(model, ladder=[batch], results=results, options=CaptureOptions(freeze_gc=False))
    x = torch.randn(batch, 16, width, device=device)
    with torch.no_grad():
        f(x)
    [graph] = f.graph_call.graphs()
    with torch.set_grad_enabled(grad):
        call = host_us(lambda: f(x), device, burst=10)
    bare = host_us(graph.replay, device, burst=10)
    assert not f.report().eager_steps
    how = {"results": results, "grad_enabled": grad, "batch": batch}
    return {**how, "bare_us": bare, "call_us": call, "over_us": call - bare}


def tables(result: dict[str, Any]) -> list[Table]:
    """The result as tables."""
    outputs = Table(
        "bytes", "batch", *(f"{kind} CPU" for kind in Results), *(f"{kind} GPU" for kind in Results)
    )
    for row in result["outputs"]:
        figures = [row[f"{kind}_{where}_us"] for where in ("host", "device") for kind in Results]
        outputs.add_row(f"{row['bytes']:,}", str(row["batch"]), *(f"{us:.1f}" for us in figures))
    models = Table("results", "grad enabled", "batch", "bare replay", "call", "over")
    for row in result["models"]:
        how = (row["results"], str(row["grad_enabled"]), str(row["batch"]))
        models.add_row(*how, *(f"{row[name]:.1f}" for name in ("bare_us", "call_us", "over_us")))
    return [outputs, models]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--small", action="store_true", help="small sizes, to try this out on a CPU")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes, width = (SIZES[:2], 64) if options.small else (SIZES, 768)
    with torch.no_grad():
        outputs = [bench_output(device, size, batch) for batch in BATCHES for size in sizes]
    models = [
        bench_model(device, batch, width, results, grad=grad)
        for batch in (1, 8)
        for results, grad in (("copied", False), ("guarded", False), ("copied", True))
    ]
    result = {"benchmark": "safe results", "machine": machine(), "outputs": outputs, "models": models}
    for table in tables(result):
        Console(width=140).print(table)
    if options.file is not None:
        write_json(result, options.file)


if __name__ == "__main__":
    main()
