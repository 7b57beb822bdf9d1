"""Runs in a process with TRITON_INTERPRET=1 (see `test_queries`): prompts and mixed batches in both forms.

python -m kernels.query_interpreter_checks few|all
"""

import itertools
import random
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from kernels import unchanged
from kernels.paged_cases import Case, dense_attention, make_case, written_caches
from ostinato.kernels.attention import choice, get_backend, gpu_ops, triton_queries
from ostinato.kernels.attention.choice import Queries
from ostinato.kernels.gpu import H200, Gpu

TRITON = get_backend("triton", "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
# (query heads, KV heads, size): groups of 1 to 8, sizes that are powers of two and others.
SHAPES = ((4, 4, 16), (6, 2, 24), (2, 1, 128), (8, 1, 64), (7, 1, 80), (2, 2, 256), (5, 1, 64), (12, 2, 32))


@contextmanager
def division(keys: int, multiprocessors: int, parts: int = 64) -> Any:
    """Contexts are cut at multiples of so many keys, where there are so few tiles that they are cut; those
    that would have more than so many parts at multiples of more."""
    gpu = H200._replace(multiprocessors=multiprocessors)
    with (
        patch.object(choice, "_LEAST_KEYS", keys),
        patch.object(choice, "_KEYS_PER_QUERY", 0),
        patch.object(choice, "_MOST_PARTS", parts),
        patch.object(triton_queries, "gpu_of", lambda _: gpu),
    ):
        yield


def attended(case: Case, window: int | None) -> torch.Tensor:
    k_cache, v_cache = written_caches(case)
    return TRITON.attend(case.q, k_cache, v_cache, case.batch, scale=case.scale, sliding_window=window)


def is_cut(case: Case, window: int | None, gpu: Gpu) -> bool:
    (num_tokens, heads, size), batch = case.q.shape, case.batch
    limits = (batch.req_rows.size(0), batch.max_query_len, batch.max_context)
    queries = Queries(case.q.dtype, num_tokens, *limits, heads, case.k_cache.size(2), size, window or 0)
    return queries.divided(gpu)[1] is not None


def check(case: Case, window: int | None, wanted: torch.Tensor | None = None) -> None:
    out = attended(case, window)
    real, dtype = case.num_real_tokens, case.q.dtype
    assert not out[real:].any(), "padded tokens get zeros"
    expected = dense_attention(case, window) if wanted is None else wanted
    torch.testing.assert_close(out[:real].double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def random_requests(draw: random.Random) -> list[tuple[int, int]]:
    """(context, query) lengths: decodes, few tokens behind a long context, chunks, whole prompts, nothing."""
    requests = []
    for _ in range(draw.randint(1, 4)):
        context = draw.choice((1, 31, 32, 33, 64, 65, draw.randint(1, 230)))
        queries = draw.choice((0, 1, 1, draw.randint(1, 9), draw.randint(1, 40), context))
        requests.append((context, min(context, queries)))
    return requests


def check_random_batches(seeds: range) -> None:
    num_cut = 0
    for seed in seeds:
        draw = random.Random(seed)
        requests = random_requests(draw)
        heads, kv_heads, size = SHAPES[seed % len(SHAPES)]
        case = make_case(
            requests,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=size,
            padded_tokens=draw.choice((0, 3)),
            padded_requests=draw.choice((0, 2)),
            slack_context=draw.choice((40, 150)),
            dtype=torch.float16 if seed % 4 == 3 else torch.float32,
            seed=seed,
            poison=float("nan"),
        )
        # Graphs of mixed batches know no more than the number of tokens.
        if draw.random() < 0.7:
            case = replace(case, batch=replace(case.batch, max_query_len=max(1, case.q.size(0))))
        if not case.q.size(0):
            continue
        window = draw.choice((None, None, None, 9, 70, 100))
        keys = draw.choice((64, 64, 128))
        with division(keys, multiprocessors=draw.choice((4, 20, 60))):
            num_cut += is_cut(case, window, triton_queries.gpu_of(torch.device("cpu")))
            check(case, window)
    assert len(seeds) // 3 <= num_cut <= max(1, len(seeds) * 0.9), "both forms are checked"


def check_uniform_batches(lengths: Sequence[int]) -> None:
    """As drafts are verified: every request has the same few tokens."""
    for queries in lengths:
        requests = [(context, queries) for context in (200, 77, queries, 130)]
        case = make_case(requests, num_heads=4, num_kv_heads=2, padded_requests=1, padded_tokens=queries)
        with division(64, 6):
            assert case.batch.max_query_len == queries
            check(case, None)


def check_growing_chunks(requests: Sequence[tuple[int, int]]) -> None:
    """Chunks of 64 keys up to 256 tokens, of 96 up to 384, of 128 up to 512, then of 192."""
    case = make_case(requests, num_heads=4, num_kv_heads=2, padded_tokens=2, slack_context=10)
    case = replace(case, batch=replace(case.batch, max_query_len=case.q.size(0)))
    with division(64, 80, parts=4):
        gpu = triton_queries.gpu_of(torch.device("cpu"))
        limits = (len(requests), case.q.size(0), case.batch.max_context)
        _, chunks = Queries(case.q.dtype, case.q.size(0), *limits, 4, 2, 16).divided(gpu)
        assert chunks is not None
        assert (chunks.keys, chunks.parts) == (64, 4)
        assert chunks.steps >= 3
        check(case, None)


def check_bits_follow_from_the_position(windows: Sequence[int | None]) -> None:
    """Whatever runs beside a token, and however its prompt was cut into steps, its bits are the same."""
    whole = make_case([(110, 21), (70, 3)], num_heads=2, num_kv_heads=1, padded_tokens=2, slack_context=40)
    k_cache, v_cache = written_caches(whole)
    alone, rest = slice(12, 21), 17
    # The same rung, with the last of the first request's tokens alone.
    batch = replace(
        whole.batch,
        token_rows=torch.cat([whole.batch.token_rows[alone], torch.zeros(rest, dtype=torch.int32)]),
        positions=torch.cat([whole.batch.positions[alone], torch.zeros(rest, dtype=torch.int64)]),
        query_starts=torch.tensor([0, 0], dtype=torch.int32),
        query_lens=torch.tensor([9, 0], dtype=torch.int32),
    )
    q = torch.cat([whole.q[alone], torch.randn(rest, 2, 16)])
    for window, parts in itertools.product(windows, (64, 2)):
        with division(32, 4, parts):
            wanted = attended(whole, window)
            out = TRITON.attend(q, k_cache, v_cache, batch, scale=whole.scale, sliding_window=window)
            assert torch.equal(out[:9], wanted[alone]), window


def check_a_step_of_padding_alone() -> None:
    """As graphs are captured: nobody has a token, and all results are zeros."""
    case = make_case([(1, 0)], padded_tokens=9, padded_requests=3, slack_context=500, poison=float("nan"))
    case = replace(case, batch=replace(case.batch, max_query_len=9))
    with division(64, 6):
        assert is_cut(case, None, triton_queries.gpu_of(torch.device("cpu")))
        assert not attended(case, None).any()


if __name__ == "__main__":
    assert gpu_ops.INTERPRETED
    torch.set_num_threads(1)
    is_all = sys.argv[1] == "all"
    check_a_step_of_padding_alone()
    if unchanged.is_brief():
        check_random_batches(range(1))
        print("all checks passed")
        sys.exit()
    check_growing_chunks([(515, 9), (385, 2), (384, 3), (260, 9), (257, 1), (31, 31)])
    if is_all:
        for size in range(100, 530, 15):
            check_growing_chunks([(size, 30), (max(1, size - 97), 1), (530, 2)])
    check_uniform_batches((2, 5, 16) if is_all else (5,))
    check_bits_follow_from_the_position((None, 50) if is_all else (50,))
    check_random_batches(range(80) if is_all else range(6))
    print("all checks passed")
