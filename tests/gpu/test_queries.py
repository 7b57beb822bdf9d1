"""Attention of prompts and mixed batches on CUDA: both forms at real sizes, in graphs, and its time."""

import dataclasses
import itertools

import pytest
import torch

from kernels import fused_checks
from kernels.paged_cases import Case, dense_attention, make_case, written_caches
from ostinato.kernels.attention import cuda_queries, get_backend, triton_queries
from ostinato.kernels.attention.choice import Queries
from ostinato.kernels.gpu import gpu_of
from ostinato.tools.layer_step import graph_us

# (query heads, KV heads, head size)
QWEN3, LLAMA, QWEN2, PHI2, GEMMA = (16, 8, 128), (32, 8, 64), (14, 2, 64), (32, 32, 80), (8, 4, 256)
BATCHES = {
    "prefix hit": [(3000, 16)],
    "drafts": [(context, 5) for context in (2000, 77, 5, 1300, 600, 601)],
    "mixed": [(1500, 1), (700, 90), (64, 64), (33, 1), (90, 0), (2513, 2), (257, 1)],
    "decodes": [(context, 1) for context in (1, 255, 256, 257, 2049, 4000)],
    "chunk of a long prompt": [(3500, 230), (40, 1)],
}


def case_of(device, name, heads, dtype=torch.bfloat16, max_context=None) -> Case:
    case = make_case(
        BATCHES[name],
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        padded_tokens=7,
        padded_requests=3,
        dtype=dtype,
        device=device,
        poison=float("nan"),
    )
    batch = dataclasses.replace(case.batch, max_query_len=case.q.size(0), max_context=max_context or 4096)
    return dataclasses.replace(case, batch=batch)


def is_cut(case: Case, window: int | None = None) -> bool:
    (num_tokens, heads, size), batch = case.q.shape, case.batch
    limits = (batch.req_rows.size(0), batch.max_query_len, batch.max_context)
    queries = Queries(case.q.dtype, num_tokens, *limits, heads, case.k_cache.size(2), size, window or 0)
    return queries.divided(gpu_of(case.q.device))[1] is not None


def check(case: Case, window: int | None = None) -> None:
    k_cache, v_cache = written_caches(case)
    attend = get_backend("triton", case.q.device).attend
    out = attend(case.q, k_cache, v_cache, case.batch, scale=case.scale, sliding_window=window)
    real, tolerance = case.num_real_tokens, fused_checks.TOLERANCE[case.q.dtype]
    assert not out[real:].any(), "padded tokens get zeros"
    wanted = dense_attention(case, window)
    torch.testing.assert_close(out[:real].double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("name", BATCHES)
def test_contexts_that_are_cut(device, name, window):
    case = case_of(device, name, QWEN3)
    assert is_cut(case, window)
    check(case, window)


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        (LLAMA, torch.bfloat16),
        (QWEN2, torch.float16),
        (PHI2, torch.bfloat16),
        (GEMMA, torch.bfloat16),
        (QWEN3, torch.float32),
        (GEMMA, torch.float32),
        ((8, 1, 64), torch.bfloat16),
    ],
    ids=str,
)
def test_heads_and_types(device, heads, dtype):
    for name in ("prefix hit", "mixed"):
        check(case_of(device, name, heads, dtype))


def test_a_request_has_the_same_bits_in_any_company_and_however_its_prompt_is_cut(device):
    case = case_of(device, "chunk of a long prompt", QWEN3)
    assert is_cut(case)
    k_cache, v_cache = written_caches(case)
    attend = get_backend("triton", device).attend
    wanted = attend(case.q, k_cache, v_cache, case.batch, scale=case.scale)
    for first, last in itertools.pairwise((0, 1, 17, 64, 100, 230)):
        alone, count = slice(first, last), last - first
        rest = case.q.size(0) - count
        seq_lens, query_lens = case.batch.seq_lens.clone(), torch.zeros_like(case.batch.query_lens)
        seq_lens[0], query_lens[0] = 3270 + last, count
        batch = dataclasses.replace(
            case.batch,
            token_rows=torch.nn.functional.pad(case.batch.token_rows[alone], (0, rest)),
            positions=torch.nn.functional.pad(case.batch.positions[alone], (0, rest)),
            seq_lens=seq_lens,
            query_starts=torch.zeros_like(query_lens),
            query_lens=query_lens,
        )
        q = torch.cat([case.q[alone], torch.randn_like(case.q[:rest])])
        out = attend(q, k_cache, v_cache, batch, scale=case.scale)
        assert torch.equal(out[:count], wanted[alone])


def test_one_graph_serves_any_division_of_its_tokens(device):
    """Captured on padding; then one request, several, and padding again, from the same buffers."""
    attend = get_backend("triton", device).attend
    cases = [case_of(device, name, QWEN3) for name in ("prefix hit", "drafts", "decodes")]
    num_tokens, num_requests = 40, 10
    pages = max(case.batch.page_table.size(1) for case in cases)
    k_cache, v_cache = (torch.zeros(600, 16, 8, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    q = torch.zeros(num_tokens, 16, 128, device=device, dtype=torch.bfloat16)
    one = dataclasses.replace(
        cases[0].batch,
        page_table=torch.zeros(16, pages, dtype=torch.int32, device=device),
        token_rows=torch.zeros(num_tokens, dtype=torch.int32, device=device),
        positions=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        req_rows=torch.zeros(num_requests, dtype=torch.int32, device=device),
        seq_lens=torch.ones(num_requests, dtype=torch.int32, device=device),
        query_starts=torch.zeros(num_requests, dtype=torch.int32, device=device),
        query_lens=torch.zeros(num_requests, dtype=torch.int32, device=device),
        max_query_len=num_tokens,
    )
    attend(q, k_cache, v_cache, one, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, k_cache, v_cache, one, scale=0.1)
    fields = ("token_rows", "positions", "req_rows", "seq_lens", "query_starts", "query_lens")
    for case in (*cases, *reversed(cases)):
        for name in fields:
            field, new = getattr(one, name), getattr(case.batch, name)
            field.fill_(1 if name == "seq_lens" else 0)
            field[: new.numel()] = new
        rows, columns = case.batch.page_table.shape
        one.page_table[:rows, :columns] = case.batch.page_table
        for cache, written in zip((k_cache, v_cache), written_caches(case), strict=True):
            cache[: written.size(0)] = written.nan_to_num()
        q[: case.q.size(0)] = case.q
        out.fill_(float("nan"))
        graph.replay()
        wanted = dense_attention(dataclasses.replace(case, scale=0.1))
        real = case.num_real_tokens
        torch.testing.assert_close(out[:real].double(), wanted, atol=3e-2, rtol=3e-2)
        assert not out[real:].any()


def prefix_hit_us(device, num_tokens: int, context: int, max_context: int = 32_768) -> float:
    """Of one layer of Qwen3-0.6B, in a chain of layers whose caches L2 does not hold."""
    case = make_case(
        [(context, num_tokens)],
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
        device=device,
    )
    batch = dataclasses.replace(case.batch, max_context=max_context)
    caches = [(case.k_cache.clone(), case.v_cache.clone()) for _ in range(4)]
    attend = get_backend("triton", device).attend

    def layers() -> None:
        for k_cache, v_cache in caches:
            attend(case.q, k_cache, v_cache, batch, scale=case.scale)

    return graph_us(layers) / len(caches)


@pytest.mark.alone
def test_few_tokens_behind_a_long_context_take_little_longer_than_one(device):
    """16 tokens at 32k took 1,100 us a layer: 8 programs read the whole context."""
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 9 or properties.multi_processor_count < 100:
        pytest.skip("times are those of a Hopper")
    assert prefix_hit_us(device, 16, 32_768) < 60
    assert prefix_hit_us(device, 16, 1024) < 35


@pytest.mark.alone
def test_short_contexts_take_no_longer_than_uncut(device, monkeypatch):
    """Where no context is longer than a chunk: the join has nothing to do. Both by Triton."""
    monkeypatch.setattr(cuda_queries, "serves", lambda *_: False)
    cut = prefix_hit_us(device, 16, 200)
    monkeypatch.setattr(Queries, "divided", _uncut(Queries.divided))
    assert cut < prefix_hit_us(device, 16, 200) * 1.1 + 2


def _uncut(divided):
    return lambda self, gpu: (divided(dataclasses.replace(self, max_context=1), gpu)[0], None)


def test_the_form_that_serves_is_the_one_that_is_said(device, monkeypatch):
    case = case_of(device, "prefix hit", QWEN3)
    launched = []
    monkeypatch.setattr(cuda_queries, "serves", lambda *_: False)
    for name in ("_attend_whole", "_attend_chunks"):
        kernel = getattr(triton_queries, name)
        monkeypatch.setattr(triton_queries, name, _Noted(kernel, name, launched))
    check(case)
    check(case, 200)
    assert launched == ["_attend_chunks", "_attend_whole"]


class _Noted:
    def __init__(self, kernel, name, launched):
        self.kernel, self.name, self.launched = kernel, name, launched

    def __getitem__(self, grid):
        self.launched.append(self.name)
        return self.kernel[grid]
