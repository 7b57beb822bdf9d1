"""The torch backend against dense float64 attention, and its right to be captured."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.paged_cases import Case, dense_attention, make_case, written_caches
from ostinato.graphs import CaptureOptions, graphed
from ostinato.kernels.attention import AttentionBatch, get_backend, torch_reference

TORCH = get_backend("torch", "cpu")


@st.composite
def cases(draw, dtype=torch.float32):
    requests = []
    for _ in range(draw(st.integers(1, 5))):
        seq_len = draw(st.integers(1, 200))
        query_len = draw(st.one_of(st.sampled_from([0, 1, seq_len]), st.integers(1, min(seq_len, 40))))
        requests.append((seq_len, query_len))
    if not sum(query_len for _, query_len in requests):
        requests[0] = (requests[0][0], 1)
    kv_heads = draw(st.integers(1, 3))
    return make_case(
        requests,
        num_kv_heads=kv_heads,
        num_heads=kv_heads * draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([8, 20])),
        padded_tokens=draw(st.integers(0, 3)),
        padded_requests=draw(st.integers(0, 3)),
        slack_context=draw(st.integers(0, 40)),
        seed=draw(st.integers(0, 1000)),
        poison=draw(st.sampled_from([None, 1e30, float("nan")])),
        dtype=dtype,
    )


windows = st.one_of(st.none(), st.integers(1, 64))


def step(case: Case, window: int | None, attend=TORCH.attend, **options) -> torch.Tensor:
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    TORCH.write_kv(case.k, case.v, k_cache, v_cache, case.batch)
    return attend(case.q, k_cache, v_cache, case.batch, scale=case.scale, sliding_window=window, **options)


def assert_close(case: Case, out: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(
        out[: case.num_real_tokens].double(), wanted.double(), atol=tolerance, rtol=tolerance
    )


@settings(max_examples=60, deadline=None)
@given(cases(), windows)
def test_both_ways_equal_dense_attention(case, window):
    wanted = dense_attention(case, window)
    assert_close(case, step(case, window), wanted)
    assert_close(case, step(case, window, TORCH.attend_eager), wanted)
    assert_close(case, step(case, window, TORCH.attend_eager, lengths=case.lengths), wanted)


@settings(max_examples=40, deadline=None)
@given(cases(dtype=torch.float64), windows, st.sampled_from([0, 1 << 40]), st.sampled_from([1, 300, 1 << 22]))
def test_every_strategy_of_the_captured_way_is_the_same_function(case, window, gather_cost, piece):
    """Padded queries or a gather per token, whole or in pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_reference, "_GATHER_COST", gather_cost)
        patch.setattr(torch_reference, "_PIECE_ELEMENTS", piece)
        assert_close(case, step(case, window), dense_attention(case, window), 1e-12)


@settings(max_examples=30, deadline=None)
@given(cases())
def test_kv_is_written_at_the_slots_and_nowhere_else(case):
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    TORCH.write_kv(case.k, case.v, k_cache, v_cache, case.batch)
    for cache, wanted in zip((k_cache, v_cache), written_caches(case), strict=True):
        assert torch.equal(cache[1:], wanted[1:])


@pytest.mark.parametrize("attend", [TORCH.attend, TORCH.attend_eager])
@pytest.mark.parametrize("max_query_len", [1, 4])
def test_outputs_of_padded_tokens_are_finite(attend, max_query_len):
    case = make_case([(9, 1), (30, 1)], padded_tokens=6, padded_requests=2, max_query_len=max_query_len)
    assert step(case, None, attend).isfinite().all()


@pytest.mark.parametrize("attend", [TORCH.attend, TORCH.attend_eager])
def test_a_batch_of_padding_alone_is_legal(attend):
    case = make_case([], padded_tokens=4, padded_requests=4)
    assert step(case, None, attend).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_caches(dtype):
    case = make_case([(50, 1), (20, 20), (33, 5)], dtype=dtype, padded_tokens=2)
    wanted = dense_attention(case)
    assert_close(case, step(case, None), wanted, 2e-2)
    assert_close(case, step(case, None, TORCH.attend_eager), wanted, 2e-2)


@pytest.mark.parametrize(
    ("requests", "max_query_len"),
    [([(40, 1), (7, 1), (100, 1)], 1), ([(40, 1), (30, 12), (9, 9)], 12), ([(5, 2)] * 12, 24)],
    ids=["decode", "mixed", "many"],
)
@pytest.mark.parametrize("window", [None, 8])
def test_the_captured_way_is_captured_and_follows_its_buffers(requests, max_query_len, window):
    """Captured once, on lengths of 1, then replayed with others in the same buffers."""
    case = make_case(requests, padded_tokens=2, padded_requests=1, max_query_len=max_query_len)
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()

    def captured(q, k, v, token_rows, positions, page_table, req_rows, seq_lens, query_starts, query_lens):
        batch = AttentionBatch(
            page_table,
            token_rows,
            positions,
            req_rows,
            seq_lens,
            query_starts,
            query_lens,
            case.batch.max_query_len,
            case.batch.max_context,
        )
        TORCH.write_kv(k, v, k_cache, v_cache, batch)
        return TORCH.attend(q, k_cache, v_cache, batch, scale=case.scale, sliding_window=window)

    shared = ("page_table", "req_rows", "seq_lens", "query_starts", "query_lens")
    pads = {"token_rows": 0, "positions": 0}  # page 0 is padding's
    options = CaptureOptions(strict=True)
    function = graphed(captured, ladder=[case.q.size(0)], shared=shared, pads=pads, options=options)
    tokens = (case.q, case.k, case.v, case.batch.token_rows, case.batch.positions)
    requests_of = [getattr(case.batch, name) for name in shared]
    idle = [torch.zeros_like(t) for t in requests_of]
    idle[2] += 1
    function.capture(*(torch.zeros_like(t) for t in tokens), *idle)
    out = function(*tokens, *requests_of)
    assert_close(case, out, dense_attention(case, window))
    assert not function.report().eager_steps
