"""The CUDA kernel of prompts and mixed batches, from its Python launch on, in the emulator."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from kernels.cuda_emulator.emulated import MAY_SKIP, Emulator
from kernels.fast_cases import slow_but_for
from kernels.fused_checks import TOLERANCE
from kernels.paged_cases import Case, dense_attention, make_case, written_caches
from ostinato.kernels.attention import cuda_decode, cuda_queries
from ostinato.kernels.gpu import Gpu

pytestmark = pytest.mark.skipif(MAY_SKIP, reason="needs g++")


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("kernels"))


@contextmanager
def emulated(emulator: Emulator, multiprocessors: int) -> Iterator[None]:
    gpu = Gpu((9, 0), multiprocessors)
    with (
        patch.multiple(cuda_queries, cuda_kernel=emulator.kernel, gpu_of=lambda device: gpu),
        patch.object(cuda_decode, "_counters_of_caches", {}),
    ):
        yield
        counters = [counters for _, counters in cuda_decode._counters_of_caches.values()]
        assert counters
        assert not any(of_cache.any() for of_cache in counters)


def attended(case: Case, window: int | None) -> torch.Tensor:
    batch, (k_cache, v_cache) = case.batch, written_caches(case)
    assert cuda_queries.fits(case.q, k_cache, batch.req_rows.size(0))
    return cuda_queries.attend_queries(
        case.q, batch.paged(k_cache, v_cache), batch.requests, case.scale, window or 0
    )


def check(case: Case, window: int | None = None) -> None:
    out, real, tolerance = attended(case, window), case.num_real_tokens, TOLERANCE[case.q.dtype]
    assert not out[real:].any(), "padded tokens get zeros"
    wanted = dense_attention(case, window)
    torch.testing.assert_close(out[:real].double(), wanted, atol=tolerance, rtol=tolerance)


# (query heads, KV heads, head size), (context, queries) of requests, window, multiprocessors
CASES = {
    "one key": ((1, 1, 64), [(1, 1)], None, 1),
    "a prompt": ((2, 1, 64), [(70, 70)], None, 2),
    "blocks of keys": ((2, 1, 64), [(300, 100)], None, 3),
    "a whole block": ((1, 1, 64), [(256, 128)], None, 2),
    "heads of 128": ((4, 2, 128), [(140, 40)], None, 2),
    "heads of 256": ((2, 1, 256), [(90, 70)], None, 1),
    "a group of three": ((6, 2, 64), [(150, 50), (3, 3)], None, 2),
    "a mixed batch": ((4, 1, 64), [(200, 1), (33, 33), (5, 0), (130, 1), (129, 2)], None, 3),
    "a window": ((2, 1, 64), [(300, 90), (20, 20)], 40, 2),
    "a window of blocks": ((1, 1, 64), [(420, 60)], 200, 1),
}


@pytest.mark.parametrize(
    "name",
    slow_but_for(
        CASES,
        *("one key", "blocks of keys", "heads of 128", "heads of 256", "a group of three", "a mixed batch"),
        "a window of blocks",
    ),
)
def test_attention_is_right(emulator, name):
    heads, requests, window, multiprocessors = CASES[name]
    case = make_case(
        requests,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        padded_tokens=5,
        padded_requests=2,
        dtype=torch.float16 if "three" in name else torch.bfloat16,
        poison=float("nan"),
    )
    with emulated(emulator, multiprocessors):
        check(case, window)


def test_pages_that_lie_one_behind_the_other_come_together(emulator):
    """Some blocks of keys are such a row, others are not."""
    case = make_case([(500, 40)], num_heads=2, num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    row = int(case.batch.req_rows[0])
    pages = torch.arange(1, 33, dtype=torch.int32)
    pages[[18, 20]] = pages[[20, 18]]
    case.batch.page_table[row] = pages
    with emulated(emulator, 1):
        check(case)


def test_what_lies_behind_the_last_key_is_not_seen(emulator):
    """Pages are used again: the rest of the last one has what somebody else left, a NaN perhaps."""
    case = make_case([(41, 9), (20, 20)], num_heads=2, num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    k_cache, v_cache = written_caches(case)
    used = torch.zeros(k_cache.shape[:2], dtype=torch.bool)
    for row, length in zip(case.batch.req_rows.tolist(), case.batch.seq_lens.tolist(), strict=True):
        for position in range(length):
            used[case.batch.page_table[row, position // 16], position % 16] = True
    k_cache[~used] = v_cache[~used] = float("nan")
    with (
        emulated(emulator, 1),
        patch.dict(globals(), written_caches=lambda case: (k_cache, v_cache)),
    ):
        check(case)


def test_bits_follow_from_the_position(emulator):
    """Whatever runs beside a token, and however its prompt was cut into steps, its bits are the same.

    Tokens 64 to 115 are in a tile that goes on to the third block of keys, or in one that ends before it:
    what they have summed up by then must shrink by exactly one where a block has nothing for them to see.
    """
    emulator = replace(emulator, contracts=True)
    whole = make_case([(290, 150), (70, 3)], num_heads=2, num_kv_heads=1, head_dim=64, dtype=torch.float16)
    whole.q[:, 1] *= 3  # heads with scores of several sizes
    caches = written_caches(whole)
    part = slice(52, 150)
    batch = replace(
        whole.batch,
        query_starts=torch.tensor([0, 0], dtype=torch.int32),
        query_lens=torch.tensor([98, 0], dtype=torch.int32),
    )
    for window in (None, 100):
        with emulated(emulator, 2), patch.dict(globals(), written_caches=lambda case: caches):
            together = attended(whole, window)[part]
            alone = attended(replace(whole, q=whole.q[part], batch=batch), window)
        assert torch.equal(together, alone)
