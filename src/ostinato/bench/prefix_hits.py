"""Time to the first token of prompts whose beginning is in the prefix cache, and of attention in such steps.

python -m ostinato.bench.prefix_hits benchmarks/results/prefix-hits-h200.json
python -m ostinato.bench.prefix_hits /tmp/before.json --any-batch
python -m ostinato.bench.prefix_hits /tmp/divisions.json --divisions

The first table is one layer's attention in a captured graph, over caches that L2 does not hold: with one
program for each block of queries, which reads the whole context, and as it is. The second goes through
`LLM.generate`, one token each: random weights, a prefix that was seen before, and new tokens at its
end, other ones every time, from a list and from an array; and what the host's clock says of the parts of its
two steps (`wait`: for the device), the rest being what comes before and behind them. Between the two: from
the projection to attention of few tokens of one request, as any batch and with a kernel of its own.
`--any-batch` serves such tokens like any batch in the second table, too. With `--divisions` attention alone,
for other divisions of the work than the one that is chosen.
"""

import argparse
import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from ostinato import LLM, SamplingParams
from ostinato.engine.stepping.planned_graphs import PlannedGraphs
from ostinato.kernels.attention import PAGE_SIZE, AttentionBatch, HeadPreparation, get_backend
from ostinato.kernels.attention.choice import Chunks, Queries, QueryTile
from ostinato.kernels.gpu import Gpu
from ostinato.models.config import ModelConfig

from ..tools.layer_step import graph_us
from ..tools.machine import machine
from ..tools.results import write_json
from .repository import MODELS

CONTEXTS, NEW_TOKENS = (1024, 8192, 32_768), (16, 64, 256)
LONGEST = max(CONTEXTS) + PAGE_SIZE
REPEATS = 15
KINDS: dict[str, Callable[[list[int]], Any]] = {"list": list, "array": lambda ids: np.array(ids, np.int32)}
"""What a prompt's ids come in. A list of 32k numbers has to be made an array first, which takes 0.3 ms."""
LAYERS = 4
"""In a chain: of the shorter contexts L2 would hold one."""
BATCHES = {
    **{
        f"{tokens} behind {context - tokens}": [(context, tokens)]
        for context in (256, *CONTEXTS)
        for tokens in NEW_TOKENS
        if tokens < context
    },
    "16 x 5 drafts at 8192": [(8192, 5)] * 16,
    "4 x 5 drafts at 32768": [(32_768, 5)] * 4,
    "64 behind 8128, 30 decodes at 4096": [(8192, 64), *[(4096, 1)] * 30],
    "prompt of 256": [(256, 256)],
    "prompt of 4096": [(4096, 4096)],
}
"""(context, new tokens) of each request."""

Division = tuple[QueryTile, Chunks | None]
Caches = tuple[torch.Tensor, torch.Tensor]


def first_token_ms(llm: LLM, context: int, new: int, kind: str) -> dict[str, Any]:
    """One row: prompts of `context` tokens of which `new` are, as a list or as an array."""
    vocab = llm.engine.core.loaded.model.config.vocab_size
    draw, made = random.Random(f"{context} {new} {kind}"), KINDS[kind]
    prefix = [draw.randrange(vocab) for _ in range(context - new)]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    times, parts = [], []
    for _ in range(REPEATS + 2):
        prompt = {"prompt_token_ids": made(prefix + [draw.randrange(vocab) for _ in range(new)])}
        llm.step_times(reset=True)
        began = time.perf_counter()
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        times.append((time.perf_counter() - began) * 1e3)
        of_steps = llm.step_times().microseconds
        parts.append({**of_steps, "rest": times[-1] * 1e3 - sum(of_steps.values())})
    assert output.num_cached_tokens == context - new
    # The first fills the cache, the second is the first that finds it.
    times, parts = times[2:], parts[2:]
    us = {part: round(statistics.median(each[part] for each in parts), 1) for part in parts[0]}
    return {"context": context, "new_tokens": new, "ms": statistics.median(times), "us": us, "ms_each": times}


def whole_steps() -> list[dict[str, Any]]:
    """Rows through the engine."""
    rows = []
    with LLM(
        str(MODELS / "qwen3-0.6b"),
        load_format="dummy",
        max_model_len=LONGEST,
        max_running_requests=16,
        num_pages=3 * LONGEST * len(NEW_TOKENS) // PAGE_SIZE,
        cuda_graph_bs=(1,),
        cuda_graph_prefill_tokens=(*NEW_TOKENS, 4096),
    ) as llm:
        print("context  new tokens  prompt  first token ms   of it us", flush=True)
        for context, new in itertools.product(CONTEXTS, NEW_TOKENS):
            for kind in KINDS:
                rows.append({"prompt": kind, **first_token_ms(llm, context, new, kind)})
                told = ", ".join(f"{part} {us:.0f}" for part, us in rows[-1]["us"].items())
                print(f"{context:7d}  {new:10d}  {kind:6s}  {rows[-1]['ms']:14.2f}   {told}", flush=True)
        assert not llm.graph_report().eager_steps
    return rows


def batch_of(config: ModelConfig, requests: list[tuple[int, int]]) -> tuple[AttentionBatch, list[Caches]]:
    """Requests of (context, new tokens), and caches for `LAYERS`."""
    device = torch.device("cuda")
    kv_heads, size = config.num_kv_heads, config.head_dim
    pages = [-(-context // PAGE_SIZE) for context, _ in requests]
    ends = list(itertools.accumulate(pages))
    order = torch.randperm(ends[-1], device=device).int() + 1
    table = torch.zeros(len(requests) + 1, max(pages), dtype=torch.int32, device=device)
    for row, (count, end) in enumerate(zip(pages, ends, strict=True), start=1):
        table[row, :count] = order[end - count : end]
    lengths = [new for _, new in requests]
    num_tokens = sum(lengths)

    def ints(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype, device=device)

    batch = AttentionBatch(
        page_table=table,
        token_rows=ints(row for row, new in enumerate(lengths, start=1) for _ in range(new)),
        positions=ints((p for c, new in requests for p in range(c - new, c)), torch.int64),
        req_rows=ints(range(1, len(requests) + 1)),
        seq_lens=ints(context for context, _ in requests),
        query_starts=ints(itertools.accumulate([0, *lengths[:-1]])),
        query_lens=ints(lengths),
        max_query_len=lengths[0] if len(set(lengths)) == 1 else num_tokens,
        max_context=LONGEST,
    )
    shape = (ends[-1] + 1, PAGE_SIZE, kv_heads, size)

    def cache() -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    return batch, [(cache(), cache()) for _ in range(LAYERS)]


def layer(config: ModelConfig, requests: list[tuple[int, int]]) -> Callable[[], None]:
    """Attention of one batch, `LAYERS` times."""
    batch, caches = batch_of(config, requests)
    shape = (batch.token_rows.size(0), config.num_heads, config.head_dim)
    q = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    attend = get_backend("triton", "cuda").attend

    def run() -> None:
        for k_cache, v_cache in caches:
            attend(q, k_cache, v_cache, batch, scale=config.attention_scale)

    return run


def end_of_prompt(config: ModelConfig, context: int, new: int, *, alone: bool) -> Callable[[], None]:
    """From the projection to attention of one request's new tokens, `LAYERS` times."""
    batch, caches = batch_of(config, [(context, new)])
    # As wide as an engine's table: how many chunks there may be follows from it.
    table = torch.nn.functional.pad(batch.page_table, (0, LONGEST // PAGE_SIZE - batch.page_table.size(1)))
    batch = dataclasses.replace(batch, page_table=table.contiguous(), equal_places=alone)
    size = config.head_dim
    width = (config.num_heads + 2 * config.num_kv_heads) * size
    qkv = torch.randn(new, width, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(size, device="cuda", dtype=torch.bfloat16)
    heads = HeadPreparation(torch.randn(LONGEST, size, device="cuda"), norm, norm)
    attend_qkv = get_backend("triton", "cuda").attend_qkv
    assert attend_qkv is not None

    def run() -> None:
        for each in caches:
            attend_qkv(qkv, heads, *each, batch, num_heads=config.num_heads, scale=config.attention_scale)

    return run


def ends(config: ModelConfig) -> list[dict[str, Any]]:
    """Rows of few tokens of one request."""
    rows = []
    print("from projection to attention, us      as any batch   alone", flush=True)
    for context, new in itertools.product((256, *CONTEXTS), (4, 8, 12, 16)):
        any_us, alone_us = (
            graph_us(end_of_prompt(config, context, new, alone=alone)) / LAYERS for alone in (False, True)
        )
        rows.append({"context": context, "new_tokens": new, "any_us": any_us, "alone_us": alone_us})
        print(f"{new:4d} behind {context - new:6d}{any_us:30.1f}{alone_us:8.1f}", flush=True)
    return rows


@contextmanager
def like_any_batch(wanted: bool) -> Iterator[None]:
    """Inside, engines have no graphs for one request, if that is wanted."""
    with patch.object(PlannedGraphs, "_keys_alone", lambda *_: []) if wanted else nullcontext():
        yield


@contextmanager
def divided(change: Callable[[Queries, Gpu, Division], Division]) -> Iterator[None]:
    """Inside, work is divided as this says."""
    chosen = Queries.divided
    with patch.object(Queries, "divided", lambda self, gpu: change(self, gpu, chosen(self, gpu))):
        yield


def uncut(queries: Queries, gpu: Gpu, chosen: Division) -> Division:
    """One program for each block of queries, as it was: 64 query heads at a time."""
    tile, chunks = chosen
    if chunks is None:
        return chosen
    return dataclasses.replace(tile, query_block=64 // tile.group_block, num_stages=4), None


def kernels(config: ModelConfig) -> list[dict[str, Any]]:
    """Rows of attention alone."""
    rows = []
    print("one layer's attention, us             before     now", flush=True)
    for name, requests in BATCHES.items():
        run = layer(config, requests)
        now = graph_us(run) / LAYERS
        with divided(uncut):
            before = graph_us(run) / LAYERS
        rows.append({"batch": name, "requests": requests, "uncut_us": before, "us": now})
        print(f"{name:36s}{before:8.1f}{now:8.1f}", flush=True)
    return rows


def divisions(config: ModelConfig) -> list[dict[str, Any]]:
    """Other sizes of tiles and chunks."""
    rows = []
    print("batch                  heads a tile  stages   keys of a chunk: us", flush=True)
    for new, context in itertools.product(NEW_TOKENS, CONTEXTS[1:]):
        run = layer(config, [(context, new)])
        for heads, stages in itertools.product((16, 32, 64), (4, 5)):
            times = {}
            for keys in (256, 512, 1024, 2048):

                def other(
                    queries: Queries,
                    gpu: Gpu,
                    chosen: Division,
                    heads: int = heads,
                    stages: int = stages,
                    keys: int = keys,
                ) -> Division:
                    tile, chunks = chosen
                    assert chunks is not None
                    block = dataclasses.replace(
                        tile, query_block=heads // tile.group_block, num_stages=stages
                    )
                    return block, dataclasses.replace(chunks, keys=keys, steps=0, parts=-(-LONGEST // keys))

                with divided(other):
                    times[keys] = graph_us(run) / LAYERS
            rows.append({"new": new, "context": context, "heads": heads, "stages": stages, "us": times})
            shown = "  ".join(f"{keys}: {us:.1f}" for keys, us in times.items())
            print(f"{new:4d} behind {context - new:6d} {heads:12d} {stages:9d}   {shown}", flush=True)
    return rows


def main(file: Path, *, only_divisions: bool, any_batch: bool) -> None:
    """Measure, print and write."""
    began = time.perf_counter()
    config = ModelConfig.load(MODELS / "qwen3-0.6b")
    if only_divisions:
        found = {"divisions": divisions(config)}
    else:
        found = {"kernels": kernels(config), "ends": ends(config)}
        torch.cuda.empty_cache()
        with like_any_batch(any_batch):
            found["first_token"] = whole_steps()
    seconds = round(time.perf_counter() - began, 1)
    described = {"benchmark": "prefix hits", "machine": machine(), "model": "qwen3-0.6b", "seconds": seconds}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json({**described, **found}, file)
    print(f"{seconds} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="where the result goes")
    parser.add_argument("--divisions", action="store_true", help="other divisions of the work instead")
    parser.add_argument("--any-batch", action="store_true", help="no graphs for one request")
    arguments = parser.parse_args()
    main(arguments.file, only_divisions=arguments.divisions, any_batch=arguments.any_batch)
