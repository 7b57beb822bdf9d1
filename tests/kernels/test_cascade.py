"""Attention over a prefix that requests share: the torch reference, and the kernels without a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.interpreted import assert_passes
from kernels.paged_cases import dense_attention, make_case
from ostinato.kernels.attention import PAGE_SIZE, choice, get_backend
from ostinato.kernels.gpu import H200

TORCH = get_backend("torch", "cpu")
NAN = float("nan")


@st.composite
def shared_cases(draw, dtype=torch.float64):
    pages = draw(st.integers(0, 6))
    behind = draw(st.lists(st.integers(1, 90), min_size=1, max_size=5))
    kv_heads = draw(st.integers(1, 3))
    return make_case(
        [(pages * PAGE_SIZE + own, 1) for own in behind],
        num_kv_heads=kv_heads,
        num_heads=kv_heads * draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([8, 20])),
        padded_tokens=(padding := draw(st.integers(0, 3))),
        padded_requests=padding,
        slack_context=draw(st.integers(0, 40)),
        seed=draw(st.integers(0, 1000)),
        poison=draw(st.sampled_from([None, 1e30, NAN])),
        dtype=dtype,
        shared_pages=pages,
    )


def step(case, window=None):
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    TORCH.write_kv(case.k, case.v, k_cache, v_cache, case.batch)
    return TORCH.attend(case.q, k_cache, v_cache, case.batch, scale=case.scale, sliding_window=window)


@settings(max_examples=60, deadline=None)
@given(shared_cases(), st.sampled_from([None, 7, 1000]))
def test_the_reference_equals_dense_attention(case, window):
    out = step(case, window)
    assert out.isfinite().all(), "padded tokens"
    torch.testing.assert_close(
        out[: case.num_real_tokens], dense_attention(case, window), atol=1e-12, rtol=1e-12
    )


def test_a_shared_prefix_is_read_from_the_pages_of_the_first_request():
    """What other requests have in these columns of the page table does not matter."""
    case = make_case([(40, 1), (50, 1), (33, 1)], shared_pages=2)
    before = step(case)
    case.batch.page_table[case.batch.req_rows[1:].long(), :2] = 0
    assert torch.equal(step(case), before)


def test_half_precision_caches():
    case = make_case([(70, 1), (65, 1), (90, 1)], dtype=torch.bfloat16, padded_tokens=2, shared_pages=4)
    wanted = dense_attention(case)
    torch.testing.assert_close(step(case)[:3].double(), wanted, atol=2e-2, rtol=2e-2)


def test_splits_fill_the_chip_and_never_outnumber_the_blocks_of_the_longest_prefix():
    for num_tokens in (2, 8, 32, 64, 128, 256):
        for heads, kv_heads in ((16, 8), (32, 8), (14, 2), (32, 32)):
            tile = choice.prefix_tile(torch.bfloat16, num_tokens, heads // kv_heads, 128, H200)
            splits = choice.prefix_splits_of(tile, num_tokens, heads, kv_heads, 8192, H200)
            blocks = -(-num_tokens * (heads // kv_heads) // tile.query_block)
            assert splits == 32 or splits * blocks * kv_heads > 132 // 2
            assert splits * blocks * kv_heads <= max(264, blocks * kv_heads)
            short = choice.prefix_splits_of(tile, num_tokens, heads, kv_heads, 256, H200)
            assert short <= 256 // (tile.key_block * tile.least_blocks)


@pytest.mark.parametrize("cases", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_the_kernels_are_right_in_the_interpreter(cases):
    assert_passes("kernels.cascade_interpreter_checks", cases, 110)
