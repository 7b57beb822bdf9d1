"""Runs in a process with TRITON_INTERPRET=1 (see `test_cascade`): attention over a shared prefix."""

import sys
from typing import Any
from unittest.mock import patch

import torch

from kernels import fused_checks, unchanged
from kernels.paged_cases import make_case
from ostinato.kernels.attention import choice, gpu_ops, triton_decode
from ostinato.kernels.gpu import H200

CASES = (
    # shared pages, lengths of contexts, (query heads, KV heads, size of a head), norm
    (0, (40, 1, 33), (6, 2, 24), True),
    (1, (17, 40, 70), (4, 4, 16), False),
    (7, (113, 150, 114, 300), (7, 1, 80), True),
    (20, (321, 340), (14, 2, 32), True),
    (9, (145, 146, 200, 160, 150), (2, 1, 128), False),
)
FEW = (CASES[0], CASES[1], (9, (145, 160), (4, 2, 32), True))


def check_contexts(cases: Any) -> None:
    """Prefixes of no, one and several pages and splits; one token or more behind them; padded rows."""
    for pages, lengths, heads, norm in cases:
        options = {"norm": norm, "max_query_len": 1, "shared_pages": pages}
        decode = [(length, 1) for length in lengths]
        fused_checks.check_attend_qkv("cpu", torch.float32, decode, heads, **options)


def check_more_blocks_of_queries() -> None:
    """More queries than a tile holds, and half precision."""
    decode = [(81 + number, 1) for number in range(9)]
    options = {"norm": True, "max_query_len": 1, "shared_pages": 5}
    fused_checks.check_attend_qkv("cpu", torch.float32, decode, (9, 1, 16), **options)
    fused_checks.check_attend_qkv("cpu", torch.float16, decode[:5], (4, 2, 16), **options)


def check_windows() -> None:
    """One that cuts contexts: as if nothing was shared. One that does not: as if there was none."""
    decode = [(length, 1) for length in (129, 150, 130)]
    options = {"norm": True, "max_query_len": 1, "shared_pages": 8}
    for window in (140, 155):
        fused_checks.check_attend_qkv("cpu", torch.float32, decode, (4, 2, 16), window=window, **options)


def check_the_op_is_declared_truthfully() -> None:
    """What is changed is said to be changed, and nothing else is."""
    case = make_case([(20, 1)], shared_pages=1)
    b = case.batch
    rows, rotary, weight = torch.randn(1, 8 * 16), torch.randn(32, 16), torch.randn(16)
    tokens = (b.page_table, b.token_rows, b.positions, b.prefix_lens)
    torch.library.opcheck(
        torch.ops.ostinato.attend_tokens.default,
        (rows, rotary, weight, weight, 1e-5, case.k_cache, case.v_cache, *tokens, 4, case.scale, 0, 32),
        test_utils=("test_schema", "test_faketensor"),
    )


if __name__ == "__main__":
    assert gpu_ops.INTERPRETED
    torch.set_num_threads(1)
    # A few splits show what many do.
    with (
        patch.object(choice, "_PROGRAMS_WANTED", 60),
        patch.object(triton_decode, "gpu_of", lambda _: H200._replace(multiprocessors=6)),
    ):
        is_all = sys.argv[1] == "all"
        check_contexts(CASES if is_all else FEW[: 1 if unchanged.is_brief() else None])
        if is_all:
            check_more_blocks_of_queries()
        if not unchanged.is_brief():
            check_windows()
            check_the_op_is_declared_truthfully()
    print("all checks passed")
