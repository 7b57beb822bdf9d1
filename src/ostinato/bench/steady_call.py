"""What a steady call of `graphed` costs the CPU, checks included, over a bare replay of its graph.

python -m ostinato.bench.steady_call benchmarks/results/steady-call-h200.json

Models of 12 layers: a GPT-2 of transformers called with `input_ids=`, the same wrapped by PEFT, and an
encoder of torch's called with a tensor. `--small` is for a machine without a GPU.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel

from ostinato.graphs import CaptureOptions, graphed

from ..tools.machine import machine
from ..tools.results import write_json
from ..tools.timing import host_us

LAYERS = 12
BATCH = 2
LENGTH = 8
BURSTS = 49


def gpt2(width: int) -> torch.nn.Module:
    """A GPT-2 that returns logits alone."""
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    config = GPT2Config(
        n_layer=LAYERS, n_embd=width, n_head=4, vocab_size=512, use_cache=False, attn_pdrop=0.0, **tokens
    )
    return GPT2LMHeadModel(config)


def gpt2_with_peft(width: int) -> torch.nn.Module:
    """The same with three adapted layers in each of its own."""
    targets = ["c_attn", "c_proj", "c_fc"]
    adapted: torch.nn.Module = get_peft_model(
        gpt2(width), LoraConfig(r=4, target_modules=targets, fan_in_fan_out=True)
    )
    return adapted


def encoder(width: int) -> torch.nn.Module:
    """One tensor in, one tensor out."""
    layer = torch.nn.TransformerEncoderLayer(
        width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )
    return torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


MODELS: dict[str, Callable[[int], torch.nn.Module]] = {
    "GPT-2": gpt2,
    "GPT-2 with PEFT": gpt2_with_peft,
    "nn.TransformerEncoder": encoder,
}


def bench(name: str, device: torch.device, width: int, *, grad: bool) -> dict[str, Any]:
    """The first call in seconds, and a steady one in microseconds of the CPU."""
    torch.manual_seed(0)
    model = MODELS[name](width).to(device).eval()
    f = graphed(model, ladder=[1, BATCH], options=CaptureOptions(freeze_gc=False))
    if name.startswith("GPT"):
        given = {"input_ids": torch.ones(BATCH, LENGTH, dtype=torch.int64, device=device)}
    else:
        given = {"src": torch.randn(BATCH, LENGTH, width, device=device)}
    call = (lambda: f(**given)) if name.startswith("GPT") else (lambda: f(given["src"]))
    with torch.set_grad_enabled(grad):
        started = time.perf_counter()
        call()
        first = time.perf_counter() - started
        call()
        [entry] = f.graph_call._entries
        [graph] = [graph for graph in f.graph_call.graphs() if graph.descriptor.num_tokens == BATCH]
        checks = host_us(
            lambda: (entry.is_standing(), entry.runner.reads_hold()), device, burst=10, bursts=BURSTS
        )
        whole = host_us(call, device, burst=10, bursts=BURSTS)
        bare = host_us(graph.replay, device, burst=10, bursts=BURSTS)
    assert not f.report().eager_steps, f.report()
    times = {"first_s": first, "checks_us": checks, "call_us": whole, "bare_us": bare}
    return {"model": name, "grad_enabled": grad, **times, "over_us": whole - bare}


def table(rows: list[dict[str, Any]]) -> Table:
    """The result as a table."""
    shown = Table("model", "grad enabled", "first call, s", "checks, µs", "call", "bare replay", "over")
    for row in rows:
        times = (row[name] for name in ("checks_us", "call_us", "bare_us", "over_us"))
        how = (row["model"], str(row["grad_enabled"]), f"{row['first_s']:.2f}")
        shown.add_row(*how, *(f"{us:.1f}" for us in times))
    return shown


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--small", action="store_true", help="small models, to try this out on a CPU")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    width = 64 if options.small else 768
    bench("GPT-2", device, width, grad=False)  # what is slow once per process
    rows = [bench(name, device, width, grad=grad) for name in MODELS for grad in (False, True)]
    Console(width=140).print(table(rows))
    result = {"benchmark": "steady call", "machine": machine(), "calls": rows}
    if options.file is not None:
        write_json(result, options.file)


if __name__ == "__main__":
    main()
