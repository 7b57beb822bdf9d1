"""What adapters cost the layers of a decode step, beside the same layers without, in captured graphs.

python benchmarks/lora_layers.py benchmarks/results/lora-layers-h200.json [--model llama-3.1-8b] [--rank 16]

Cases of each batch, in turns: no adapters at all; the graph for adapters with none in the batch; four
adapters, of four slots and of 64; and, for the parts of the cost, the kernels of adapters alone. What a step
does once (`rows`) is apart.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ostinato.kernels.lora import NO_ADAPTER, Adapted, Adapters, LowRank, Rows, Stack
from ostinato.kernels.lora.deltas import Shrunk
from ostinato.models.layer import Layer
from ostinato.models.layers import Linear
from ostinato.models.weights import load_model
from ostinato.tools.layer_step import LayerStep, graph_us
from ostinato.tools.machine import machine

ROOT = Path(__file__).parents[1]
BATCHES = (1, 8, 32, 64, 128, 256)
LAYERS, CONTEXT, ACTIVE, ROUNDS = 16, 192, 4, 5
WANTED = {1: 0.08, 32: 0.12, 128: 0.15}
"""At most so much more than without, of a step with four adapters."""


def stacks_of(layers: list[Layer], num_slots: int, rank: int) -> dict[str, Stack]:
    """Random adapters in all slots of all linear layers."""
    stacks = {}
    for layer in layers:
        for linear in layer.modules():
            if isinstance(linear, Linear):
                weight, parts = linear.weight, linear.parts or (linear.weight.size(0),)
                options = {"dtype": weight.dtype, "device": weight.device}
                stack = Stack.empty(num_slots, rank, weight.size(1), parts, **options)
                a = torch.randn(rank, weight.size(1), **options) * weight.size(1) ** -0.5
                adapter = [LowRank(a, torch.randn(rows, rank, **options) * 0.01) for rows in parts]
                for slot in range(num_slots):
                    stack.put(slot, adapter)
                stacks[linear.name] = stack
    return stacks


def slots_of(batch_size: int) -> Tensor:
    """Four adapters, one after the other."""
    return torch.arange(batch_size, dtype=torch.int32, device="cuda") % ACTIVE


def in_turns(cases: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds of a replay of each, the median over rounds in which each comes once."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, run in cases.items():
            times[name].append(graph_us(run, rounds=3))
    return {name: statistics.median(found) for name, found in times.items()}


def measured(step: LayerStep, batch_size: int, all_stacks: dict[int, dict[str, Stack]]) -> dict[str, Any]:
    """Microseconds a layer of each case, and how much more than without that is."""
    slots = slots_of(batch_size)
    none = torch.full_like(slots, NO_ADAPTER)

    def case(num_slots: int, rows: Tensor) -> Callable[[], Any]:
        adapters = Adapters(all_stacks[num_slots], Rows.of(rows, num_slots))
        return lambda: step.run_layers(adapters)

    few, many = min(all_stacks), max(all_stacks)
    us = in_turns(
        {
            "without": step.run_layers,
            "none in the batch": case(few, none),
            f"{ACTIVE} of {few}": case(few, slots),
            f"{ACTIVE} of {many}": case(many, slots),
        }
    )
    results: dict[str, Any] = {"form": step.model.form(batch_size).name}
    for name, found in us.items():
        more = found / us["without"] - 1
        results[name] = {"us": round(found / LAYERS, 2), "more": round(more, 4)}
        print(f"{batch_size:4d} {name:20s} {found / LAYERS:8.2f} us a layer {more:+7.1%}", flush=True)
    for name, found in alone(step, batch_size, all_stacks[few]).items():
        results[name] = round(found / LAYERS, 2)
        print(f"{batch_size:4d} {name:20s} {found / LAYERS:8.2f} us", flush=True)
    return results


def alone(step: LayerStep, batch_size: int, stacks: dict[str, Stack]) -> dict[str, float]:
    """The kernels of adapters of one kind of layer, over all layers."""
    rows = Rows.of(slots_of(batch_size), ACTIVE)
    inputs = {"qkv_proj": step.hidden, "o_proj": step.attended}
    inputs |= {"gate_up_proj": step.hidden, "down_proj": step.inner}
    found = {}
    for kind, x in inputs.items():
        of_kind = [stack for name, stack in stacks.items() if name.endswith(kind)]

        def shrink(x: Tensor = x, of_kind: list[Stack] = of_kind) -> list[Shrunk]:
            return [Shrunk.of(x, Adapted(stack, rows)) for stack in of_kind]

        def both(shrink: Callable[[], list[Shrunk]] = shrink) -> list[Any]:
            return [shrunk.deltas() for shrunk in shrink()]

        found[f"{kind}: shrink"] = graph_us(shrink)
        found[f"{kind}: and expand"] = graph_us(both)
    found["rows"] = graph_us(lambda: [Rows.of(rows.slots, ACTIVE) for _ in range(LAYERS)])
    return found


@torch.no_grad()
def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result_file", type=Path)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--rank", type=int, default=16)
    arguments = parser.parse_args()
    folder = ROOT / "benchmarks" / "models" / arguments.model
    model = load_model(folder, device="cuda", dtype=torch.bfloat16, load_format="dummy")
    layers = [cast(Layer, layer) for layer in model.layers][:LAYERS]
    all_stacks = {num_slots: stacks_of(layers, num_slots, arguments.rank) for num_slots in (ACTIVE, 64)}
    results = {}
    for batch_size in BATCHES:
        step = LayerStep(model, batch_size, num_layers=LAYERS, context=CONTEXT)
        results[batch_size] = measured(step, batch_size, all_stacks)
    record = {"machine": machine(), "model": arguments.model, "rank": arguments.rank, "results": results}
    arguments.result_file.write_text(json.dumps(record, indent=1) + "\n")
    for batch_size, most in WANTED.items():
        more = results[batch_size][f"{ACTIVE} of {ACTIVE}"]["more"]
        print(f"batch {batch_size}: {more:+.1%} a layer, at most {most:.0%} of a step wanted")


if __name__ == "__main__":
    main()
