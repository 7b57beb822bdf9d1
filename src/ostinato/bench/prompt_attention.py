"""Attention of prompts from the paged cache beside torch's own from plain tensors, as TFLOP/s.

python -m ostinato.bench.prompt_attention benchmarks/results/prompt-attention-h200.json

One layer's attention in a captured graph, bf16, heads of 128: by CUDA C++, by Triton, and, for batches of
whole prompts of one length, by SDPA's flash and cuDNN backends over contiguous keys and values. Operations
counted are those of keys that a query sees. Pages are shuffled, or, where it is said, in order.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ostinato.kernels.attention import PAGE_SIZE, AttentionBatch, cuda_queries, get_backend

from ..tools.layer_step import graph_us
from ..tools.machine import machine
from ..tools.results import write_json

HEADS = {"16/8": (16, 8), "32/8": (32, 8)}
HEAD_DIM = 128
Requests = list[tuple[int, int]]
BATCHES: dict[str, Requests] = {
    "1 x 512": [(512, 512)],
    "1 x 1,024": [(1024, 1024)],
    "1 x 4,096": [(4096, 4096)],
    "4 x 4,096": [(4096, 4096)] * 4,
    "1 x 16,384": [(16_384, 16_384)],
    "1 x 65,536": [(65_536, 65_536)],
    "32 x 512": [(512, 512)] * 32,
    "2,048 behind 30,720": [(32_768, 2048)],
    "4,096 behind 12,288": [(16_384, 4096)],
    "2,048 and 64 decodes at 4,096": [(2048, 2048), *[(4096, 1)] * 64],
}
"""(context, queries) of the requests."""


def batch_of(requests: Requests, padded_requests: int = 0, *, in_order: bool = False) -> AttentionBatch:
    """On the device; pages in no order, or one behind the other."""
    longest = max(context for context, _ in requests)
    pages_each = -(-longest // PAGE_SIZE)
    order = torch.randperm(len(requests) * pages_each, generator=torch.Generator().manual_seed(1)) + 1
    order = order.sort().values if in_order else order
    table = torch.zeros(len(requests) + 1, pages_each, dtype=torch.int64)
    table[1:] = order.view(len(requests), pages_each)
    contexts, lengths = (torch.tensor(column) for column in zip(*requests, strict=True))
    rows = torch.arange(1, len(requests) + 1)
    positions = torch.cat([torch.arange(context - queries, context) for context, queries in requests])

    def ints(values: Tensor, padding: int = 0, kind: torch.dtype = torch.int32) -> Tensor:
        return functional.pad(values, (0, padded_requests), value=padding).to("cuda", kind)

    return AttentionBatch(
        page_table=table.to("cuda", torch.int32),
        token_rows=rows.repeat_interleave(lengths).to("cuda", torch.int32),
        positions=positions.to("cuda"),
        req_rows=ints(rows),
        seq_lens=ints(contexts, 1),
        query_starts=ints(lengths.cumsum(0) - lengths),
        query_lens=ints(lengths),
        max_query_len=len(positions),
        max_context=longest,
    )


def flops_of(requests: Requests, num_heads: int) -> float:
    """Of the two products, keys that are seen only."""
    seen = sum(queries * (2 * context - queries + 1) / 2 for context, queries in requests)
    return 4.0 * seen * num_heads * HEAD_DIM


def paged(
    requests: Requests, heads: tuple[int, int], *, in_order: bool = False
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Attention by CUDA C++, and by Triton."""
    batch = batch_of(requests, padded_requests=256 - len(requests), in_order=in_order)
    pages = int(batch.page_table.max()) + 1
    k_cache, v_cache = torch.randn(
        2, pages, PAGE_SIZE, heads[1], HEAD_DIM, device="cuda", dtype=torch.bfloat16
    )
    q = torch.randn(batch.positions.size(0), heads[0], HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    attend = get_backend("triton", q.device).attend

    def by_cuda() -> Tensor:
        return attend(q, k_cache, v_cache, batch, scale=HEAD_DIM**-0.5)

    def by_triton() -> Tensor:
        with mock.patch.object(cuda_queries, "serves", return_value=False):
            return by_cuda()

    return by_cuda, by_triton


def contiguous(
    requests: Requests, heads: tuple[int, int], backend: SDPBackend
) -> Callable[[], Tensor] | None:
    """Attention by torch; None for what it cannot do in one call."""
    if len(set(requests)) > 1 or requests[0][0] != requests[0][1]:
        return None
    q, k, v = (
        torch.randn(len(requests), number, requests[0][0], HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for number in (heads[0], heads[1], heads[1])
    )

    def attend() -> Tensor:
        with sdpa_kernel([backend]):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return attend


def row_of(name: str, requests: Requests, heads: tuple[int, int]) -> dict[str, Any]:
    """TFLOP/s of each, in turns."""
    by_cuda, by_triton = paged(requests, heads)
    in_order, _ = paged(requests, heads, in_order=True)
    ways: dict[str, Callable[[], Tensor] | None] = {
        "cuda": by_cuda,
        "cuda, pages in order": in_order,
        "triton": by_triton,
        "sdpa flash": contiguous(requests, heads, SDPBackend.FLASH_ATTENTION),
        "sdpa cudnn": contiguous(requests, heads, SDPBackend.CUDNN_ATTENTION),
    }
    difference = (by_cuda().float() - by_triton().float()).abs().max().item()
    times: dict[str, list[float]] = {way: [] for way, attend in ways.items() if attend is not None}
    for _ in range(3):
        for way in times:
            attend = ways[way]
            assert attend is not None
            times[way].append(graph_us(attend, replays=5, rounds=3))
    microseconds = {way: statistics.median(taken) for way, taken in times.items()}
    flops = flops_of(requests, heads[0])
    return {
        "batch": name,
        "us": {way: round(us, 1) for way, us in microseconds.items()},
        "tflops": {way: round(flops / us / 1e6, 1) for way, us in microseconds.items()},
        "largest_difference": difference,
    }


def main(file: Path | None) -> None:
    """Measure, print, write."""
    rows = []
    for label, heads in HEADS.items():
        for name, requests in BATCHES.items():
            row = {"heads": label, **row_of(name, requests, heads)}
            rows.append(row)
            print(f"{label} {name:32}", row["tflops"], f"{row['largest_difference']:.4f}", flush=True)
            torch.cuda.empty_cache()
    if file is not None:
        result = {"benchmark": "prompt attention", "machine": machine(), "head_dim": HEAD_DIM, "rows": rows}
        write_json(result, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?")
    main(parser.parse_args().file)
