"""Runs in a process with TRITON_INTERPRET=1 (see `test_triton_interpreter`); one printed line a check."""

import itertools

import torch

from kernels.paged_cases import dense_attention, make_case, written_caches
from ostinato.kernels.attention import get_backend, triton_paged

TRITON = get_backend("triton", "cpu")

# (context, query) lengths; a program takes about a millisecond, so everything is tiny.
BATCHES = {
    "decode": ([(40, 1), (1, 1), (33, 1)], 1),
    "mixed": ([(40, 1), (21, 19), (9, 0), (7, 7)], 24),
    "speculative": ([(40, 3), (3, 3)], 3),
    "splits": ([(300, 1), (256, 1), (257, 1), (7, 1)], 1),
    "split queries": ([(259, 4), (513, 2)], 4),
}
SHAPES = [(4, 4, 16), (6, 2, 24), (7, 1, 80), (2, 1, 128)]


def check(name: str, shape: tuple[int, int, int], window: int | None, dtype: torch.dtype) -> None:
    requests, max_query_len = BATCHES[name]
    heads, kv_heads, head_dim = shape
    case = make_case(
        requests,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        padded_tokens=2,
        padded_requests=2,
        slack_context=5,
        max_query_len=max_query_len,
        dtype=dtype,
        poison=float("nan"),
    )
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    TRITON.write_kv(case.k, case.v, k_cache, v_cache, case.batch)
    for cache, wanted in zip((k_cache, v_cache), written_caches(case), strict=True):
        assert torch.equal(cache[1:], wanted[1:]), "write_kv"
    out = TRITON.attend(case.q, k_cache, v_cache, case.batch, scale=case.scale, sliding_window=window)
    assert out.isfinite().all(), "padded tokens"
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    wanted = dense_attention(case, window)
    torch.testing.assert_close(out[: case.num_real_tokens].double(), wanted, atol=tolerance, rtol=tolerance)


def check_views_of_a_fused_projection() -> None:
    case = make_case([(20, 5)], num_heads=4, num_kv_heads=2, head_dim=16)
    fused = torch.cat([case.q.flatten(1), case.k.flatten(1), case.v.flatten(1)], dim=1)
    q, k, v = (part.unflatten(1, (-1, 16)) for part in fused.split([4 * 16, 2 * 16, 2 * 16], dim=1))
    assert not q.is_contiguous()
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    TRITON.write_kv(k, v, k_cache, v_cache, case.batch)
    out = TRITON.attend_eager(q, k_cache, v_cache, case.batch, scale=case.scale, lengths=case.lengths)
    torch.testing.assert_close(out.double(), dense_attention(case), atol=2e-5, rtol=2e-5)


def check_ops_are_declared_truthfully() -> None:
    case = make_case([(20, 5)])
    b = case.batch
    torch.library.opcheck(
        triton_paged.write_paged_kv,
        (case.k, case.v, case.k_cache, case.v_cache, b.page_table, b.token_rows, b.positions),
    )
    lengths = (b.req_rows, b.seq_lens, b.query_starts, b.query_lens)
    torch.library.opcheck(
        triton_paged.paged_attention,
        (case.q, case.k_cache, case.v_cache, b.page_table, *lengths, 5, 20, case.scale, 0),
    )


def main() -> None:
    assert triton_paged.INTERPRETED
    for name, window in itertools.product(BATCHES, (None, 9)):
        check(name, (6, 2, 24), window, torch.float32)
        print(name, window)
    for shape, name in itertools.product(SHAPES, ("decode", "mixed")):
        check(name, shape, None, torch.float32)
        print(name, shape)
    for name in ("decode", "mixed", "splits"):
        check(name, (4, 2, 16), None, torch.float16)
        print(name, "float16")
    check_views_of_a_fused_projection()
    print("views")
    check_ops_are_declared_truthfully()
    print("opcheck")
    print("all checks passed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
