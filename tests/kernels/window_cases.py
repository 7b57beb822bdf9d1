"""Cases in which the pages before all windows are gone, and every kernel that must not look for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from kernels import fused_checks
from kernels.paged_cases import Case, dense_attention, make_case
from ostinato.kernels.attention.batch import PAGE_SIZE, WINDOW_ALIGNMENT


def without_beginnings(case: Case, window: int) -> Case:
    """Page 0 in place of all pages that a request may have given back."""
    page_table = case.batch.page_table.clone()
    for at, (query_len, seq_len) in enumerate(
        zip(case.lengths.query_lens, case.lengths.seq_lens, strict=True)
    ):
        first = max(0, seq_len - query_len - window + 1)
        gone = first // WINDOW_ALIGNMENT * WINDOW_ALIGNMENT // PAGE_SIZE
        page_table[case.batch.req_rows[at], :gone] = 0
    return replace(case, batch=replace(case.batch, page_table=page_table))


@contextmanager
def beginnings_gone(window: int) -> Iterator[None]:
    """Inside, `fused_checks.check_attend_qkv` works on such cases; what it wants is as it would be."""
    whole: list[Case] = []

    def made(*args: Any, **options: Any) -> Case:
        whole.append(make_case(*args, **options))
        gone = without_beginnings(whole[-1], window)
        assert (gone.batch.page_table != whole[-1].batch.page_table).any(), "nothing is gone"
        return gone

    def wanted(case: Case, window: int | None) -> Tensor:
        return dense_attention(replace(case, batch=whole[-1].batch), window)

    with patch.multiple(fused_checks, make_case=made, dense_attention=wanted):
        yield
