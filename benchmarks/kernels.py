"""Time, bytes and share of the memory's limit of each part of a decode step, as the model runs it.

python benchmarks/kernels.py benchmarks/results/kernels-h200.json [MODEL ...]

Every part runs in a captured graph of its own, once for each layer, so that weights come from memory and gaps
between kernels count. MODELs are folders of benchmarks/models; default: all of them.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ostinato.kernels import rows
from ostinato.kernels.attention import PAGE_SIZE, AttentionBatch, HeadPreparation, get_backend
from ostinato.models.transformer import FromRows, Layer, StepAttention, Transformer
from ostinato.models.weights import load_model
from ostinato.tools.machine import machine

ROOT = Path(__file__).parents[1]
BATCHES = (1, 8, 32, 128, 256)
CONTEXT = 192
READ_BYTES_PER_US = 4.5e6
"""The best rate at which an H200 was seen to read."""
MOST_LAYERS = 16

Part = tuple[Callable[[int], Any], int]
"""What runs for a layer, and the bytes it cannot do without."""


class Step:
    """A model with its caches, and a batch of single tokens."""

    def __init__(self, model: Transformer, batch_size: int) -> None:
        config, device = model.config, torch.device("cuda")
        self.model = model
        self.layers = list(cast("Iterable[Layer]", model.layers))[:MOST_LAYERS]
        pages = -(-CONTEXT // PAGE_SIZE)
        shape = (batch_size * pages + 1, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        dtype = model.embed_tokens.weight.dtype
        self.caches = [
            (torch.randn(shape, device=device).to(dtype), torch.randn(shape, device=device).to(dtype))
            for _ in self.layers
        ]
        table = torch.zeros(batch_size + 1, pages, dtype=torch.int32, device=device)
        order = torch.randperm(batch_size * pages, device=device) + 1
        table[1:] = order.view(batch_size, pages).int()
        ones = torch.ones(batch_size, dtype=torch.int32, device=device)
        each = torch.arange(batch_size, dtype=torch.int32, device=device)
        positions = torch.full((batch_size,), CONTEXT - 1, device=device)
        self.batch = AttentionBatch(
            table, each + 1, positions, each + 1, ones * CONTEXT, each, ones, 1, CONTEXT
        )
        attend_rows = get_backend("triton", device).attend_rows
        assert attend_rows is not None
        self._attend_rows = functools.partial(
            attend_rows, batch=self.batch, num_heads=config.num_heads, scale=config.attention_scale
        )
        self.mix = FromRows(StepAttention(self._refuse, self._attend), model.rotary.table)

        def random(width: int) -> Tensor:
            return torch.randn(batch_size, width, device=device).to(dtype)

        self.hidden, self.residual = random(config.hidden_size), random(config.hidden_size)
        self.qkv = random(self.layers[0].self_attn.qkv_proj.weight.size(0))
        self.attended = random(config.num_heads * config.head_dim)
        self.inner = random(config.intermediate_size)
        self.scores = torch.randn(batch_size, config.vocab_size, device=device)

    def _attend(self, layer: int, projected: Tensor, heads: HeadPreparation) -> Tensor:
        k_cache, v_cache = self.caches[layer]
        return self._attend_rows(projected, heads, k_cache, v_cache)

    def _refuse(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise AssertionError("the model starts from rows")

    def parts(self) -> dict[str, Part]:
        """The parts of a layer, in the form that this number of tokens has."""
        few = self.hidden.size(0) <= self.model.most_few_tokens
        cache_bytes = 2 * self.batch.positions.numel() * CONTEXT * self.caches[0][0][0, 0].nbytes
        layer = self.layers[0]
        attention, mlp = layer.self_attn, layer.mlp
        sizes = {
            "qkv": attention.qkv_proj.weight.nbytes + self.hidden.nbytes + self.qkv.nbytes,
            "attention": cache_bytes + self.qkv.nbytes + self.attended.nbytes,
            "o": attention.o_proj.weight.nbytes + self.attended.nbytes + self.hidden.nbytes,
            "gate, up": mlp.gate_up_proj.weight.nbytes + self.hidden.nbytes + self.inner.nbytes,
            "down": mlp.down_proj.weight.nbytes + self.inner.nbytes + self.hidden.nbytes,
            "add, norm": 4 * self.hidden.nbytes,
        }
        parts = self._few_parts() if few else self._parts()
        parts["attention"] = lambda i: self.mix(self.layers[i].self_attn, self.qkv)
        return {name: (parts[name], size) for name, size in sizes.items() if name in parts}

    def _few_parts(self) -> dict[str, Callable[[int], Any]]:
        x, layers = self.hidden, self.layers
        return {
            "qkv": lambda i: layers[i].self_attn.qkv_proj.fused(x, norm=layers[i].input_layernorm),
            "o": lambda i: layers[i].self_attn.o_proj.fused(self.attended, residual=x),
            "gate, up": lambda i: layers[i].mlp.gate_up_proj.fused(
                x, norm=layers[i].post_attention_layernorm, gated=True
            ),
            "down": lambda i: layers[i].mlp.down_proj.fused(self.inner, residual=x),
        }

    def _parts(self) -> dict[str, Callable[[int], Any]]:
        x, layers = self.hidden, self.layers
        return {
            "qkv": lambda i: layers[i].self_attn.qkv_proj(x),
            "o": lambda i: layers[i].self_attn.o_proj(self.attended),
            "gate, up": lambda i: layers[i].mlp.gate_up_proj.gated(x),
            "down": lambda i: layers[i].mlp.down_proj(self.inner),
            "add, norm": lambda i: layers[i].input_layernorm.after_adding(x, self.residual),
        }

    def whole(self) -> Callable[[], Tensor]:
        """All layers that are measured, from hidden states to hidden states."""
        few = self.hidden.size(0) <= self.model.most_few_tokens

        def run() -> Tensor:
            x, added = self.hidden, self.residual
            for layer in self.layers:
                if few:
                    x = layer.forward_few(x, self.mix)
                else:
                    x, added = layer(x, added, self.mix)
            return x + added

        return run


def microseconds(function: Callable[[], Any], replays: int = 10) -> float:
    """Of one replay of the captured function; median of five."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(5):
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / replays)
    return sorted(times)[2]


def _for_each(run: Callable[[int], Any], layers: Iterable[int]) -> None:
    for layer in layers:
        run(layer)


def measured(model: Transformer, batch_size: int) -> dict[str, dict[str, float]]:
    """Microseconds, megabytes and share of the limit, of each part and of a whole layer."""
    step = Step(model, batch_size)
    layers = range(len(step.layers))
    results = {}

    def note(name: str, us: float, num_bytes: int) -> None:
        share = num_bytes / READ_BYTES_PER_US / us
        results[name] = {"us": round(us, 2), "mb": round(num_bytes / 1e6, 2), "share": round(share, 3)}
        print(f"{batch_size:4d} {name:12s} {us:8.2f} us {num_bytes / 1e6:9.2f} MB {share:6.1%}", flush=True)

    parts = step.parts()
    for name, (run, num_bytes) in parts.items():
        over_layers = functools.partial(_for_each, run, layers)
        note(name, microseconds(over_layers) / len(layers), num_bytes)
    layer_bytes = sum(num_bytes for name, (_, num_bytes) in parts.items() if name != "add, norm")
    note("whole layer", microseconds(step.whole()) / len(layers), layer_bytes)
    weight = (model.lm_head or model.embed_tokens).weight
    head_bytes = weight.nbytes + step.scores.nbytes
    note("head", microseconds(lambda: model.logits(step.hidden, out=step.scores)), head_bytes)
    note("argmax", microseconds(lambda: [rows.argmax(step.scores) for _ in range(4)]) / 4, step.scores.nbytes)
    return results


@torch.no_grad()
def main(result_file: Path, names: list[str]) -> None:
    """Measure the models and write the results."""
    folders = sorted((ROOT / "benchmarks" / "models").iterdir())
    results: dict[str, dict[int, dict[str, dict[str, float]]]] = {}
    for folder in folders:
        if names and folder.name not in names:
            continue
        print(folder.name, flush=True)
        model = load_model(folder, device="cuda", dtype=torch.bfloat16, load_format="dummy")
        results[folder.name] = {batch_size: measured(model, batch_size) for batch_size in BATCHES}
        del model
        torch.cuda.empty_cache()
    described = {"benchmark": "kernels", "machine": machine(), "context": CONTEXT, "models": results}
    result_file.parent.mkdir(parents=True, exist_ok=True)
    result_file.write_text(json.dumps(described, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
