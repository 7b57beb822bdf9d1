"""Two other ways to build a decode step, measured beside the chain of dependent launches that it is.

python -m ostinato.bench.structure benchmarks/results/structure-h200.json

One kernel for all layers: its programs would have to meet between the parts of a layer. Measured is what
meeting takes, with nothing to do in between, and what a boundary between two dependent launches takes.

A branch beside the chain: while attention runs, a second branch of the graph asks for the weights of the
layer's later products into L2. Measured are all layers of Qwen3-0.6B with such a branch and without.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.cuda.compiled import CudaKernel
from ostinato.models.layer import Attention
from ostinato.models.weights import load_model

from ..tools.layer_step import LayerStep, graph_us
from ..tools.machine import machine
from ..tools.results import write_json
from .repository import MODELS

MODEL = MODELS / "qwen3-0.6b"
SOURCE = str(Path(__file__).with_suffix(".cu"))
BOUNDARIES = 140
"""Of a step: 28 layers of five kernels."""
PIECE = 8192
BATCHES = (1, 8, 32, 128)
CONTEXT = 192


def boundaries() -> dict[str, float]:
    """Microseconds of one boundary, by kind."""
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    meet, nothing = (CudaKernel(SOURCE, entry, {"PIECE": PIECE}) for entry in ("meet", "nothing"))

    def meeting(times: int) -> Callable[[], None]:
        return lambda: meet.launch(grid=(programs, 1, 1), block=256, args=(count, times), dependent=False)

    def chain() -> None:
        for _ in range(BOUNDARIES):
            nothing.launch(grid=(programs, 1, 1), block=256, args=())

    together = graph_us(meeting(2 * BOUNDARIES)) - graph_us(meeting(BOUNDARIES))
    return {"programs_meet": together / BOUNDARIES, "dependent_launch": graph_us(chain) / BOUNDARIES}


class Branch:
    """A second branch of a captured step, which asks for weights into L2."""

    def __init__(self, step: LayerStep) -> None:
        self._step = step
        self._stream = torch.cuda.Stream()
        self._fetch = CudaKernel(SOURCE, "fetch", {"PIECE": PIECE})
        self._mix = step.mix

    def run_layers(self) -> Tensor:
        """All layers, with the branch beside each one's attention."""
        self._step.mix = self._attend_and_fetch  # type: ignore[assignment]
        try:
            out = self._step.run_layers()
        finally:
            self._step.mix = self._mix
        torch.cuda.current_stream().wait_stream(self._stream)
        return out

    def _attend_and_fetch(self, attention: Attention, rows: Tensor) -> Tensor:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            mlp = self._step.layers[attention.index].mlp
            for linear in (attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
                pieces = linear.weight.nbytes // PIECE
                grid = (-(-pieces // 128), 1, 1)
                self._fetch.launch(grid=grid, block=128, args=(linear.weight, pieces), dependent=False)
        return self._mix(attention, rows)


def layers_with_and_without() -> list[dict[str, float]]:
    """Microseconds of all layers, by the number of tokens."""
    model = load_model(MODEL, device=torch.device("cuda"), dtype=torch.bfloat16, load_format="dummy")
    rows = []
    for batch_size in BATCHES:
        step = LayerStep(model, batch_size, num_layers=len(model.layers), context=CONTEXT)
        branch = Branch(step)
        assert torch.equal(branch.run_layers(), step.run_layers())
        chain_us, branch_us = graph_us(step.run_layers), graph_us(branch.run_layers)
        rows.append({"batch": batch_size, "chain_us": chain_us, "with_branch_us": branch_us})
    return rows


def main(file: Path) -> None:
    """Measure, print and write."""
    with torch.no_grad():
        result: dict[str, Any] = {"benchmark": "structure", "machine": machine(), "boundary_us": boundaries()}
        result["layers"] = layers_with_and_without()
    print({name: round(us, 2) for name, us in result["boundary_us"].items()})
    for row in result["layers"]:
        print({name: round(value, 1) for name, value in row.items()})
    write_json(result, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
