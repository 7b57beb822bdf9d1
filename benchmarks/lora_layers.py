"""What adapters cost the layers of a decode step, beside the same layers without, in captured graphs.

python benchmarks/lora_layers.py benchmarks/results/lora-layers-h200.json [--model llama-3.1-8b] [--rank 16]
    [--form apart,joined]

Cases of each batch, in turns: no adapters at all; the graph for adapters with none in the batch; four
adapters, of four slots and of 64. Then each linear layer by itself, over all layers: without, with adapters,
and the kernels of adapters alone. What a step does once (`rows`) is apart. `--kernels` lists what a replay of
all layers launched, with the time of each. `--form`: the ways of `ostinato.kernels.lora.ways` to take, by
name, each in turns with the others; before they are timed, each must give what the first gives, and the bits
of layers without adapters to tokens without.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ostinato.kernels.lora import NO_ADAPTER, Adapted, Adapters, LowRank, Rows, Stack
from ostinato.kernels.lora.deltas import Operands, Shrunk
from ostinato.kernels.lora.ways import NAMED, taking
from ostinato.models.layer import Layer
from ostinato.models.layers import Linear
from ostinato.models.weights import load_model
from ostinato.tools.layer_step import LayerStep, graph_us
from ostinato.tools.machine import machine

Case = TypeVar("Case")
ROOT = Path(__file__).parents[1]
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
    forms: list[str],
    *,
    lists_kernels: bool,
) -> dict[str, Any]:
    """Microseconds a layer of each case in each form, and how much more than without that is."""
    slots, each = slots_of(batch_size), torch.arange(batch_size, dtype=torch.int32, device="cuda")
    none = torch.full_like(slots, NO_ADAPTER)
    few, many = min(all_stacks), max(all_stacks)
    check(step, all_stacks[few], torch.where(each % 3 == 2, none, slots), forms)

    def case(form: str, num_slots: int, rows: Tensor) -> Callable[[], Any]:
        adapters = Adapters(all_stacks[num_slots], Rows.of(rows, num_slots))
        return in_form(form, lambda: step.run_layers(adapters))

    cases: dict[tuple[str, str], Callable[[], Any]] = {("", "without"): step.run_layers}
    for form in forms:
        cases |= {
            (form, "none in the batch"): case(form, few, none),
            (form, f"{ACTIVE} of {few}"): case(form, few, slots),
            (form, f"{ACTIVE} of {many}"): case(form, many, slots),
            (form, f"{min(batch_size, many)} of {many}"): case(form, many, each % many),
        }
    us = in_turns(cases)
    base = us["", "without"]
    results: dict[str, Any] = {"form": step.model.form(batch_size).name}
    for (form, name), found in us.items():
        into = results.setdefault(form, {}) if form else results
        into[name] = {"us": round(found / LAYERS, 2), "more": round(found / base - 1, 4)}
        line = (
            f"{batch_size:4d} {form:8s} {name:20s} {found / LAYERS:8.2f} us a layer {found / base - 1:+7.1%}"
        )
        print(line, flush=True)
    results["kinds"] = by_kind(step, batch_size, all_stacks[few], forms)
    if lists_kernels:
        runs = {"without": step.run_layers} | {form: case(form, few, slots) for form in forms}
        for name, run in runs.items():
            print(f"{batch_size:4d} kernels {name}, of {LAYERS} layers")
            results[f"kernels {name}"] = kernels_of(run)
    return results


def in_form(form: str, run: Callable[[], Any]) -> Callable[[], Any]:
    """The same, in the ways of this name."""

    def wrapped() -> Any:
        with taking(NAMED[form]):
            return run()

    return wrapped


def check(step: LayerStep, stacks: dict[str, Stack], slots: Tensor, forms: list[str]) -> None:
    """Of one layer: forms agree on what adapters change, tokens without one have the bits of no adapters."""
    adapters = Adapters(stacks, Rows.of(slots, ACTIVE))

    def run(given: Adapters | None = None) -> Tensor:
        form = step.model.form(slots.size(0), given)
        return form.through(step.layers[:1], step.hidden.clone(), step.mix, step.model.norm).clone()

    without, found = run(), [in_form(form, lambda: run(adapters))() for form in forms]
    changed = (found[0].float() - without.float()).norm()
    for form, result in zip(forms, found, strict=True):
        assert torch.equal(result[slots < 0], without[slots < 0]), f"{form}: others have other bits"
        apart = (result.float() - found[0].float()).norm() / changed
        print(
            f"{slots.size(0):4d} {form:8s} differs from {forms[0]} by {apart:.1%} of the change", flush=True
        )
        assert apart < 0.5, f"{form} is not what {forms[0]} is"


def by_kind(
    step: LayerStep, batch_size: int, stacks: dict[str, Stack], forms: list[str]
) -> dict[str, dict[str, float]]:
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
                **{form: in_form(form, products(step, kind, Adapters(stacks, rows))) for form in forms},
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
    parser.add_argument(
        "--form", type=lambda text: text.split(","), default=["apart"], help=f"of {', '.join(NAMED)}"
    )
    parser.add_argument("--kernels", action="store_true", help="list them by time")
    arguments = parser.parse_args()
    if unknown := set(arguments.form) - set(NAMED):
        parser.error(f"--form {', '.join(sorted(unknown))}: there are {', '.join(NAMED)}")
    folder = ROOT / "benchmarks" / "models" / arguments.model
    model = load_model(folder, device="cuda", dtype=torch.bfloat16, load_format="dummy")
    layers = [cast(Layer, layer) for layer in model.layers][:LAYERS]
    all_stacks = {num_slots: stacks_of(layers, num_slots, arguments.rank) for num_slots in (ACTIVE, 64)}
    results = {}
    for batch_size in arguments.batches:
        step = LayerStep(model, batch_size, num_layers=LAYERS, context=CONTEXT)
        results[batch_size] = measured(
            step, batch_size, all_stacks, arguments.form, lists_kernels=arguments.kernels
        )
    record = {"machine": machine(), "model": arguments.model, "rank": arguments.rank, "results": results}
    arguments.result_file.write_text(json.dumps(record, indent=1) + "\n")
    for batch_size, most in WANTED.items():
        if batch_size not in results:
            continue
        for form in arguments.form:
            more = results[batch_size][form][f"{ACTIVE} of {ACTIVE}"]["more"]
            print(f"batch {batch_size}, {form}: {more:+.1%} a layer, at most {most:.0%} of a step wanted")


if __name__ == "__main__":
    main()
