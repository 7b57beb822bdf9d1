"""What adapters cost the layers of a decode step, beside the same layers without, in captured graphs.

ostinato bench lora-layers benchmarks/results/lora-layers-h200.json [--model llama-3.1-8b] [--rank 16]

Cases of each batch, in turns: no adapters at all; the graph for adapters with none in the batch; four
adapters, of four slots and of 64. Then each linear layer by itself, over all layers: without, with adapters,
and the kernels of adapters alone. What a step does once (`rows`) is apart. `--kernels` lists what a replay of
all layers launched, with the time of each. Before layers are timed, tokens without an adapter must have the
bits of layers without adapters.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ostinato.kernels.lora import NO_ADAPTER, Adapted, Adapters, LowRank, Rows, Stack
from ostinato.kernels.lora.low_rank import Operands, Shrunk
from ostinato.models.layer import Layer
from ostinato.models.layers import Linear
from ostinato.models.weights import load_model

from ..tools.layer_step import LayerStep, graph_us
from ..tools.machine import machine
from ..tools.results import write_json
from .repository import MODELS

Case = TypeVar("Case")
BATCHES = (1, 8, 32, 64, 128, 256)
LAYERS, CONTEXT, ACTIVE, ROUNDS = 16, 192, 4, 3
WANTED = {1: 0.08, 32: 0.12, 128: 0.15}
"""At most so much more than without, of a step with four adapters."""


def stacks_of(layers: list[Layer], num_slots: int, rank: int) -> dict[str, Stack]:
    """Random adapters in all slots of all linear layers."""
    stacks = {}
    for layer in layers:
        for linear in layer.modules():
            if isinstance(linear, Linear):
                weight, parts = linear.weight, linear.parts or (linear.weight.size(0),)
                options: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
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


def in_turns(cases: Mapping[Case, Callable[[], Any]]) -> dict[Case, float]:
    """Microseconds of a replay of each, the median over rounds in which each comes once."""
    times: dict[Case, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, run in cases.items():
            times[name].append(graph_us(run, rounds=3))
    return {name: statistics.median(found) for name, found in times.items()}


def measured(
    step: LayerStep,
    batch_size: int,
    all_stacks: dict[int, dict[str, Stack]],
    *,
    lists_kernels: bool,
) -> dict[str, Any]:
    """Microseconds a layer of each case, and how much more than without that is."""
    slots, each = slots_of(batch_size), torch.arange(batch_size, dtype=torch.int32, device="cuda")
    none = torch.full_like(slots, NO_ADAPTER)
    few, many = min(all_stacks), max(all_stacks)
    check(step, all_stacks[few], torch.where(each % 3 == 2, none, slots))

    def case(num_slots: int, rows: Tensor) -> Callable[[], Any]:
        adapters = Adapters(all_stacks[num_slots], Rows.of(rows, num_slots))
        return lambda: step.run_layers(adapters)

    cases = {
        "without": step.run_layers,
        "none in the batch": case(few, none),
        f"{ACTIVE} of {few}": case(few, slots),
        f"{ACTIVE} of {many}": case(many, slots),
        f"{min(batch_size, many)} of {many}": case(many, each % many),
    }
    us = in_turns(cases)
    base = us["without"]
    results: dict[str, Any] = {"form": step.model.form(batch_size).name}
    for name, found in us.items():
        results[name] = {"us": round(found / LAYERS, 2), "more": round(found / base - 1, 4)}
        print(
            f"{batch_size:4d} {name:20s} {found / LAYERS:8.2f} us a layer {found / base - 1:+7.1%}",
            flush=True,
        )
    results["kinds"] = by_kind(step, batch_size, all_stacks[few])
    if lists_kernels:
        for name in ("without", f"{ACTIVE} of {few}"):
            print(f"{batch_size:4d} kernels {name}, of {LAYERS} layers")
            results[f"kernels {name}"] = kernels_of(cases[name])
    return results


def check(step: LayerStep, stacks: dict[str, Stack], slots: Tensor) -> None:
    """Of one layer: tokens with an adapter have other results, and others the bits of no adapters."""
    adapters = Adapters(stacks, Rows.of(slots, ACTIVE))

    def run(given: Adapters | None = None) -> Tensor:
        form = step.model.form(slots.size(0), given)
        return form.through(step.layers[:1], step.hidden.clone(), step.mix, step.model.norm).clone()

    without, found = run(), run(adapters)
    is_equal = (found == without).all(1)
    assert torch.equal(is_equal, slots < 0), "an adapter did nothing, or others have other bits"


def by_kind(step: LayerStep, batch_size: int, stacks: dict[str, Stack]) -> dict[str, dict[str, float]]:
    """Microseconds of one linear layer of each kind: without adapters, with, and their kernels alone."""
    rows = Rows.of(slots_of(batch_size), ACTIVE)
    inputs = {"qkv_proj": step.hidden, "o_proj": step.attended}
    inputs |= {"gate_up_proj": step.hidden, "down_proj": step.inner}
    found = {}
    for kind, x in inputs.items():
        of_kind = [stack for name, stack in stacks.items() if name.endswith(kind)]
        shrunk = Operands.of(Adapted(of_kind[0], rows)).shrunk(x)

        def shrink(x: Tensor = x, of_kind: list[Stack] = of_kind) -> list[Any]:
            adapters = [Operands.of(Adapted(stack, rows)) for stack in of_kind]
            return [each.deltas(x) if batch_size == 1 else each.shrunk(x) for each in adapters]

        def expand(of_kind: list[Stack] = of_kind, shrunk: Shrunk = shrunk) -> list[Any]:
            return [shrunk._replace(of=shrunk.of._replace(b=stack.b)).deltas() for stack in of_kind]

        us = in_turns(
            {
                "without": products(step, kind),
                "with": products(step, kind, Adapters(stacks, rows)),
                "shrink": shrink,
                "expand": expand,
            }
        )
        found[kind] = {name: round(value / LAYERS, 2) for name, value in us.items()}
        print(f"{batch_size:4d} {kind:13s} {found[kind]}", flush=True)
    found["rows"] = {"rows": graph_us(lambda: [Rows.of(rows.slots, ACTIVE) for _ in range(LAYERS)]) / LAYERS}
    return found


def products(step: LayerStep, kind: str, adapters: Adapters | None = None) -> Callable[[], Any]:
    """A linear layer of all layers, as the form of the step has it."""
    form, norm = step.model.form(step.hidden.size(0), adapters), step.layers[0].input_layernorm
    rows = form.normed(form.begin(step.residual, norm), norm)

    def run() -> None:
        for layer in step.layers:
            attention, mlp = layer.self_attn, layer.mlp
            match kind:
                case "qkv_proj":
                    form.project(rows, norm, attention.qkv_proj)
                case "o_proj":
                    form.add(rows, attention.o_proj, step.attended, norm)
                case "gate_up_proj":
                    form.project(rows, norm, mlp.gate_up_proj, gated=True)
                case "down_proj":
                    form.add(rows, mlp.down_proj, step.inner, norm)

    return run


def kernels_of(function: Callable[[], Any]) -> dict[str, dict[str, float]]:
    """By name: how often a replay launches it, and microseconds of one."""
    from torch.profiler import ProfilerActivity, profile

    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    found = {}
    for event in sorted(profiler.key_averages(), key=lambda event: -event.device_time_total):
        found[event.key[:60]] = {
            "count": event.count // 3,
            "us": round(event.device_time_total / max(event.count, 1), 2),
        }
        print(f"     {event.count // 3:4d} x {found[event.key[:60]]['us']:8.2f} us  {event.key[:60]}")
    return found


@torch.no_grad()
def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result_file", type=Path)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=BATCHES)
    parser.add_argument("--kernels", action="store_true", help="list them by time")
    arguments = parser.parse_args()
    folder = MODELS / arguments.model
    model = load_model(folder, device="cuda", dtype=torch.bfloat16, load_format="dummy")
    layers = [cast(Layer, layer) for layer in model.layers][:LAYERS]
    all_stacks = {num_slots: stacks_of(layers, num_slots, arguments.rank) for num_slots in (ACTIVE, 64)}
    results = {}
    for batch_size in arguments.batches:
        step = LayerStep(model, batch_size, num_layers=LAYERS, context=CONTEXT)
        results[batch_size] = measured(step, batch_size, all_stacks, lists_kernels=arguments.kernels)
    record = {"machine": machine(), "model": arguments.model, "rank": arguments.rank, "results": results}
    write_json(record, arguments.result_file)
    for batch_size, most in WANTED.items():
        if batch_size in results:
            more = results[batch_size][f"{ACTIVE} of {ACTIVE}"]["more"]
            print(f"batch {batch_size}: {more:+.1%} a layer, at most {most:.0%} of a step wanted")


if __name__ == "__main__":
    main()
