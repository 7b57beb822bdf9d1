"""What a step costs that verifies drafts: q tokens of each request against one, as a model runs it.

python -m ostinato.bench.verify_step benchmarks/results/verify-step-h200.json [MODEL]

Whole steps in captured graphs, dummy weights: the rows' inputs, embedding, all layers, head and the end of
the step (plain sampling, or acceptance). Then the parts of a layer, and the kernels of a step by time. MODEL
is a folder of benchmarks/models; default: llama-3.1-8b.
"""

import dataclasses
import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.decode_inputs.request_rows import begin_decode
from ostinato.kernels.sampling.plain import PlainSettings, return_plain
from ostinato.kernels.sampling.token_lines import TokenLines
from ostinato.kernels.speculation.state import SpecState
from ostinato.kernels.speculation.verification import accept, begin_verify, verified_line
from ostinato.models.transformer import Transformer
from ostinato.models.weights import load_model

from ..tools.layer_step import LayerStep, graph_us
from ..tools.machine import machine
from ..tools.results import write_json
from .repository import MODELS

STEPS = [(batch, context, q) for context in (512, 4096) for batch in (1, 8, 32) for q in (1, 5)]
STEPS += [(batch, 512, q) for batch in (1, 8) for q in (2, 3, 8)]
PARTS = [(1, 512, 1), (1, 512, 5), (8, 512, 1), (8, 512, 5), (8, 4096, 1), (8, 4096, 5)]
LAYERS_OF_PARTS = 16
LISTED = PARTS[:4]
LIMITS = {1: 1.10, 8: 1.15}
"""What five tokens may cost against one, by batch."""


class WholeStep:
    """All of a step in which every request has q tokens; q = 1 is a plain decode step."""

    def __init__(self, model: Transformer, batch_size: int, context: int, q: int) -> None:
        self._model, self._q = model, q
        self._layers = LayerStep(
            model, batch_size, num_layers=len(model.layers), context=context, query_len=q
        )
        device = model.embed_tokens.weight.device
        ones = torch.ones(batch_size + 1, dtype=torch.int32, device=device)
        self._rows = ones.cumsum(0, dtype=torch.int32)[:-1]  # 0 is padding's
        last = ones.long()
        self._state = SpecState(
            ones * context,
            last,
            torch.ones(batch_size + 1, 8, dtype=torch.int64, device=device),
            ones,
            ones * 8,
        )
        self._settings = PlainSettings(ones, ones * 0.0, last, self._state.lengths)
        self._lines = TokenLines.of(last, ones[:1].long(), verified_line(batch_size, q), 4)
        # None is accepted, so that lengths move on as in a plain step.
        self._rates = torch.zeros(8, device=device)

    def run(self) -> None:
        """One step."""
        state, model, q = self._state, self._model, self._q
        texts = (state.lengths, state.last_tokens)
        if q == 1:
            ids = begin_decode(self._rows, *texts, self._lines.began).input_ids
        else:
            ids = begin_verify(self._rows, q, *texts, state.drafts, self._lines.began).input_ids
        hidden = self._hidden(model.embed_tokens(ids))
        if q == 1:
            logits = model.logits(hidden, self._layers.scores)
            return_plain(logits, self._rows, self._settings, self._lines)
        else:
            by_position = hidden.view(-1, q, hidden.size(1)).transpose(0, 1).reshape(hidden.shape)
            logits = model.logits(by_position, self._layers.scores)
            accept(logits, self._rows, q, self._settings, state, self._rates, self._lines)

    def _hidden(self, embedded: Tensor) -> Tensor:
        layers = self._layers
        form = self._model.form(embedded.size(0))
        return form.through(layers.layers, embedded, layers.mix, self._model.norm)


def _for_each(run: Callable[[int], Any], layers: Iterable[int]) -> None:
    for layer in layers:
        run(layer)


def part_us(model: Transformer, batch_size: int, context: int, q: int) -> dict[str, float]:
    """Microseconds of the parts of a layer, of a whole one and of the head."""
    step = LayerStep(model, batch_size, num_layers=LAYERS_OF_PARTS, context=context, query_len=q)
    layers = range(LAYERS_OF_PARTS)
    found = {
        name: graph_us(functools.partial(_for_each, run, layers)) / len(layers)
        for name, (run, _) in step.parts().items()
    }
    found["whole layer"] = graph_us(step.run_layers) / len(layers)
    if q > 1:  # attention that takes any batch
        general = dataclasses.replace(step.batch, equal_places=False)
        step.use(general)
        run, _ = step.parts()["attention"]
        found["attention of any batch"] = graph_us(functools.partial(_for_each, run, layers)) / len(layers)
    found["head"] = graph_us(step.run_head)
    return {name: round(us, 2) for name, us in found.items()}


def kernel_us(run: Callable[[], None], replays: int = 3) -> list[tuple[str, float, int]]:
    """Kernels of a captured step by time: name, microseconds of all of them, how many."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    times, counts = Counter[str](), Counter[str]()
    for event in profiler.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name[:60]] += event.device_time
            counts[event.name[:60]] += 1
    return [(name, round(us / replays, 1), counts[name] // replays) for name, us in times.most_common(14)]


@torch.no_grad()
def main(result_file: Path, name: str) -> None:
    """Measure, and write what is there after each part."""
    model = load_model(MODELS / name, device="cuda", dtype=torch.bfloat16, load_format="dummy")
    results: dict[str, Any] = {"benchmark": "verify step", "machine": machine(), "model": name}
    started = time.monotonic()

    def note(kind: str, found: Any) -> None:
        results[kind] = found
        result_file.parent.mkdir(parents=True, exist_ok=True)
        write_json(results, result_file)

    steps = []
    plain: dict[tuple[int, int], float] = {}
    for batch_size, context, q in STEPS:
        us = graph_us(WholeStep(model, batch_size, context, q).run)
        plain.setdefault((batch_size, context), us)
        ratio = us / plain[batch_size, context]
        limit = LIMITS.get(batch_size) if q == 5 else None
        print(
            f"{time.monotonic() - started:5.1f} s  batch {batch_size:2d} context {context:4d} q {q} "
            f"{us:8.1f} us {ratio:6.3f}" + (f" (limit {limit})" if limit else ""),
            flush=True,
        )
        steps.append(
            {"batch": batch_size, "context": context, "q": q, "us": round(us, 1), "ratio": round(ratio, 4)}
        )
        note("steps", steps)
        torch.cuda.empty_cache()
    parts = {}
    for batch_size, context, q in PARTS:
        parts[f"{batch_size} x {q} at {context}"] = found = part_us(model, batch_size, context, q)
        print(
            f"{batch_size} x {q} at {context}:", *(f"{part} {us}" for part, us in found.items()), flush=True
        )
        note("parts", parts)
        torch.cuda.empty_cache()
    kernels = {}
    for batch_size, context, q in LISTED:
        kernels[f"{batch_size} x {q} at {context}"] = listed = kernel_us(
            WholeStep(model, batch_size, context, q).run
        )
        print(f"kernels of {batch_size} x {q} at {context}")
        for kernel, us, count in listed:
            print(f"  {us:8.1f} us {count:4d} x {kernel}", flush=True)
        note("kernels", kernels)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(Path(sys.argv[1]), (sys.argv[2:] or ["llama-3.1-8b"])[0])
