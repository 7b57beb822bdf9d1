"""Cuts without a sort: right in Triton's interpreter."""

import pytest

from kernels.filter_checks import KINDS, Filtering, counts_kept, logits_of
from kernels.interpreted import assert_passes
from ostinato.kernels.gpu import Gpu
from ostinato.kernels.sampling import filters

pytest.importorskip("triton")


@pytest.mark.parametrize("kind", KINDS)
def test_the_sorted_reference_keeps_what_the_definition_says(kind):
    case = Filtering.random(logits_of(kind, 40, 300), seed=2)
    settings = (case.temperature, case.top_k, case.top_p, case.min_p)
    kept = filters.is_kept(case.logits, *filters.reference(case.logits, *settings)).sum(-1)
    assert (kept >= counts_kept(case, -1)).all()
    assert (kept <= counts_kept(case, 1)).all()


@pytest.mark.parametrize(
    "examples",
    [0, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
    ids=["few", "many"],
)
def test_the_kernels_are_right_in_the_interpreter(examples):
    assert_passes("kernels.filter_interpreter_checks", str(examples), 1100 if examples else 110)


@pytest.mark.parametrize("multiprocessors", [1, 16, 132])
def test_programs_that_wait_for_each_other_have_room_at_a_time(multiprocessors: int) -> None:
    from ostinato.kernels.sampling.filters.triton_meeting import blocks_each_of

    for num_rows in (1, 4, 32, 256, 5000):
        for num_blocks in (1, 2, 38, 64, 1000):
            blocks_each = blocks_each_of(num_rows, num_blocks, Gpu((9, 0), multiprocessors))
            assert -(-num_blocks // blocks_each) <= multiprocessors
