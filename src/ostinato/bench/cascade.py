"""Time per output token of requests over one shared prefix: each reads its KV, or one reads it for all.

python -m ostinato.bench.cascade benchmarks/results/cascade-h200.json
python -m ostinato.bench.cascade benchmarks/results/cascade-llama-3.1-8b-h200.json --model llama-3.1-8b

One engine measures both, in turns, with its plain graphs and with those for a cascade. TPOT = (T(N) - T(1)) /
(N - 1), T(n) the time of one `generate` call with n tokens per answer, prompts from the prefix cache, greedy,
random weights; median of the repeats.
"""

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

from ostinato import LLM, SamplingParams
from ostinato.engine.stepping import shared_prefix

from ..tools.machine import machine
from ..tools.results import write_json
from .repository import MODELS

CASES = ((8, 2048), (8, 8192), (32, 2048), (32, 8192), (32, 16384), (128, 2048), (128, 8192))
"""Requests, and tokens that they share."""
OWN = (64, 128)
"""Each prompt goes on with so many tokens of its own."""
OUTPUT_LEN = 64
REPEATS = 3
PLAIN, CASCADE = "plain", "cascade"
LEAST_SAVED = {PLAIN: 1 << 62, CASCADE: 1}
"""Bytes of a layer from which on a batch runs as a cascade: none does, all do."""


def prompts_of(batch: int, shared: int, vocab: int) -> list[dict[str, list[int]]]:
    """Random ids; a longer prefix goes on where a shorter one ends."""
    draw = random.Random(0)
    prefix = [draw.randrange(vocab) for _ in range(max(length for _, length in CASES))][:shared]
    prompts = []
    for number in range(batch):
        draw = random.Random(f"{shared} {number}")
        own = [draw.randrange(vocab) for _ in range(draw.randint(*OWN))]
        prompts.append({"prompt_token_ids": prefix + own})
    return prompts


def timed(llm: LLM, prompts: list[dict[str, list[int]]], tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds, and the tokens of all requests."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    found = [output.outputs[0].token_ids for output in outputs]
    assert all(len(ids) == tokens for ids in found)
    return seconds, found


def num_cascades(llm: LLM) -> int:
    """Steps that were replayed from a graph for a cascade."""
    return sum(row.replays for row in llm.graph_report().graphs if row.descriptor.endswith("cascade"))


def measured(llm: LLM, batch: int, shared: int) -> dict[str, Any]:
    """One row of the result."""
    prompts = prompts_of(batch, shared, llm.engine.core.loaded.model.config.vocab_size)
    default = shared_prefix.LEAST_SAVED_BYTES
    bytes_per_token = llm.engine.core.runner.kv_bytes_per_token
    # The first fills the prefix cache, the second finds all of it there.
    for _ in range(2):
        timed(llm, prompts, 2)
    tpot: dict[str, list[float]] = {PLAIN: [], CASCADE: []}
    tokens = {}
    try:
        for _ in range(REPEATS):
            for kind, least in LEAST_SAVED.items():
                shared_prefix.LEAST_SAVED_BYTES = least
                before = num_cascades(llm)
                first, _ = timed(llm, prompts, 1)
                whole, tokens[kind] = timed(llm, prompts, OUTPUT_LEN)
                tpot[kind].append((whole - first) / (OUTPUT_LEN - 1) * 1e3)
                cascades = num_cascades(llm) - before
                # A step or two of each call takes the ends of prompts along.
                assert cascades >= OUTPUT_LEN - 8 if kind == CASCADE else not cascades, (kind, cascades)
    finally:
        shared_prefix.LEAST_SAVED_BYTES = default
    pairs = [
        (plain, cascade)
        for one, other in zip(tokens[PLAIN], tokens[CASCADE], strict=True)
        for plain, cascade in zip(one, other, strict=True)
    ]
    medians = {kind: statistics.median(times) for kind, times in tpot.items()}
    return {
        "batch": batch,
        "shared_tokens": shared,
        "tpot_ms": medians,
        "tpot_ms_each": tpot,
        "gain": medians[PLAIN] / medians[CASCADE],
        "saved_mb_a_layer": (batch - 1) * shared * bytes_per_token / 1e6,
        "chosen_by_default": shared_prefix.pays(batch, shared, bytes_per_token),
        # Behind a near tie everything differs: weights are random.
        "equal_tokens": sum(plain == cascade for plain, cascade in pairs) / len(pairs),
    }


def main(file: Path, model: str) -> None:
    """Measure, print and write."""
    began = time.perf_counter()
    longest = max(length for _, length in CASES) + OWN[1] + OUTPUT_LEN
    batches = sorted({batch for batch, _ in CASES})
    rows = []
    with LLM(
        str(MODELS / model),
        load_format="dummy",
        max_model_len=longest,
        max_running_requests=batches[-1],
        cuda_graph_bs=tuple(batches),
        cuda_graph_prefill_tokens=(512, 2048, 4096),
        enable_cascade_attention=True,
    ) as llm:
        print(f"{model}: started in {time.perf_counter() - began:.0f} s", flush=True)
        print("batch  shared  plain ms  cascade ms  gain  default  equal tokens")
        for batch, shared in CASES:
            row = measured(llm, batch, shared)
            rows.append(row)
            plain, cascade = (row["tpot_ms"][kind] for kind in (PLAIN, CASCADE))
            chosen = "cascade" if row["chosen_by_default"] else "plain"
            print(
                f"{batch:5d}  {shared:6d}  {plain:8.3f}  {cascade:10.3f}  {row['gain']:4.1f}  {chosen:>7s}  "
                f"{row['equal_tokens']:.0%}",
                flush=True,
            )
        eager = dict(llm.graph_report().eager_steps)
    described = {
        "benchmark": "cascade attention",
        "machine": machine(),
        "model": model,
        "own_tokens": OWN,
        "output_len": OUTPUT_LEN,
        "repeats": REPEATS,
        "seconds": round(time.perf_counter() - began, 1),
        "eager_steps": eager,
        "rows": rows,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(described, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="where the result goes")
    parser.add_argument("--model", default="qwen3-0.6b", help="a folder of benchmarks/models")
    arguments = parser.parse_args()
    main(arguments.file, arguments.model)
