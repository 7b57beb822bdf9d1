"""Attention of prompts by CUDA C++ at real sizes: against float64, in graphs, and bit for bit."""

import dataclasses

import pytest
import torch

from kernels import fused_checks
from kernels.paged_cases import Case, dense_attention, make_case, written_caches
from ostinato.kernels.attention import cuda_queries, get_backend
from ostinato.kernels.cuda.compiled import has_warpgroup_products

# (query heads, KV heads, head size)
QWEN3, LLAMA, LLAMA_1B, QWEN2, GEMMA = (16, 8, 128), (32, 8, 128), (32, 8, 64), (28, 4, 128), (8, 4, 256)
MHA, WIDE_GROUP = (8, 8, 64), (64, 2, 128)
LENGTHS = [(1, 1), (2, 2), (127, 127), (128, 128), (129, 129), (700, 513), (1500, 1), (1025, 31), (5, 0)]


@pytest.fixture(autouse=True)
def _on_hopper(device):
    if not has_warpgroup_products(device):
        pytest.skip("products of four warps are Hopper's")


def case_of(device, requests, heads, dtype=torch.bfloat16, seed=0) -> Case:
    return make_case(
        requests,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        padded_tokens=9,
        padded_requests=4,
        dtype=dtype,
        device=device,
        poison=float("nan"),
        seed=seed,
    )


def attended(case: Case, caches, window=None):
    batch = case.batch
    assert cuda_queries.serves(case.q, caches[0], batch.req_rows.size(0))
    return cuda_queries.attend_queries(case.q, batch.paged(*caches), batch.requests, case.scale, window or 0)


@pytest.mark.parametrize("window", [None, 3, 300])
@pytest.mark.parametrize("heads", [QWEN3, LLAMA, LLAMA_1B, QWEN2, GEMMA, MHA, WIDE_GROUP], ids=str)
def test_any_mixture_of_lengths_is_right(device, heads, window):
    for seed, dtype in enumerate((torch.bfloat16, torch.float16)):
        case = case_of(device, LENGTHS, heads, dtype, seed)
        out, tolerance = attended(case, written_caches(case), window), fused_checks.TOLERANCE[dtype]
        real = case.num_real_tokens
        assert not out[real:].any(), "padded tokens get zeros"
        wanted = dense_attention(case, window)
        torch.testing.assert_close(out[:real].double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("context", "queries"), [(4096, 4096), (16_385, 2048), (65_537, 300), (65_000, 1)])
def test_long_contexts_are_right(device, context, queries):
    """Some tokens of each, in float64."""
    heads = QWEN3
    case = case_of(device, [(context, queries), (77, 77)], heads)
    out = attended(case, (case.k_cache, case.v_cache))
    pages = case.batch.page_table[case.batch.req_rows[0]].long()
    k, v = (cache[pages].flatten(0, 1).double() for cache in (case.k_cache, case.v_cache))
    for token in {0, queries // 3, queries // 2, queries - 1}:
        seen = context - queries + token + 1
        q = case.q[token].double().view(heads[1], -1, heads[2])
        weights = torch.einsum("hgd,khd->hgk", q, k[:seen]).mul(case.scale).softmax(-1)
        wanted = torch.einsum("hgk,khd->hgd", weights, v[:seen]).flatten(0, 1)
        torch.testing.assert_close(out[token].double(), wanted, atol=4e-3, rtol=2e-2)


@pytest.mark.parametrize("heads", [QWEN3, GEMMA, LLAMA_1B], ids=str)
def test_pages_in_a_row_and_more_requests_than_three_places_leave_room_for(device, heads):
    requests = [(1 + 37 * number % 300, 1 + number % 3) for number in range(600)]
    requests = [(max(context, queries), queries) for context, queries in requests]
    case = case_of(device, [*requests, (900, 700)], heads)
    row, number = case.batch.req_rows[-5], -(-900 // 16)
    last = case.k_cache.size(0)
    case.batch.page_table[row, :number] = torch.arange(last - number, last)  # others have them too
    caches, real = written_caches(case), case.num_real_tokens
    out, tolerance = attended(case, caches), fused_checks.TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(out[:real].double(), dense_attention(case), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 500])
def test_a_request_has_the_same_bits_in_any_company_and_however_its_prompt_is_cut(device, window):
    case = case_of(device, [(3000, 2000), (600, 600), (900, 1)], QWEN3)
    caches = written_caches(case)
    together = attended(case, caches, window)
    for first, last in ((0, 1), (1, 700), (700, 733), (733, 2000)):
        seq_lens, query_lens = case.batch.seq_lens.clone(), torch.zeros_like(case.batch.query_lens)
        seq_lens[0], query_lens[0] = 1000 + last, last - first
        batch = dataclasses.replace(
            case.batch,
            seq_lens=seq_lens,
            query_starts=torch.zeros_like(case.batch.query_starts),
            query_lens=query_lens,
        )
        alone = attended(dataclasses.replace(case, q=case.q[first:last], batch=batch), caches, window)
        assert torch.equal(alone, together[first:last])


def test_who_takes_a_tile_does_not_change_its_bits(device):
    """Programs draw tiles in an order that is never the same; some come first in a program, others later."""
    case = case_of(device, [(5000, 4000), (3000, 1500)], LLAMA)
    caches = written_caches(case)
    wanted = attended(case, caches)
    assert all(torch.equal(attended(case, caches), wanted) for _ in range(20))


def test_one_graph_serves_any_division_of_its_tokens(device):
    case = case_of(device, [(900, 500), (540, 40), (300, 1)], QWEN3)
    caches = written_caches(case)
    batch = case.batch
    attended(case, caches)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attended(case, caches)
    for contexts, lengths in (((900, 500, 300), (37, 500, 4)), ((41, 540, 1), (41, 499, 1))):
        starts = (0, lengths[0], lengths[0] + lengths[1])
        for buffer, values in (
            (batch.seq_lens, contexts),
            (batch.query_lens, lengths),
            (batch.query_starts, starts),
        ):
            buffer[:3].copy_(torch.tensor(values))
        wanted = attended(case, caches).clone()
        for _ in range(3):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, wanted)
            assert not out[sum(lengths) :].any()


def test_the_backend_uses_it_where_contexts_are_not_cut(device, monkeypatch):
    case = case_of(device, [(1000, 1000)], QWEN3)
    used = []
    attend = cuda_queries.attend_queries
    monkeypatch.setattr(cuda_queries, "attend_queries", lambda *given: used.append(1) or attend(*given))
    backend = get_backend("triton", device)
    backend.attend(case.q, case.k_cache, case.v_cache, case.batch, scale=case.scale)
    assert used
