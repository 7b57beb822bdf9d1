"""Cuts without a sort: right in Triton's interpreter, and accepted by the compiler for Hopper."""

import pytest
import torch

from kernels.filter_checks import KINDS, Filtering, counts_kept, logits_of
from kernels.interpreted import assert_passes
from ostinato.kernels.sampling import filters

triton = pytest.importorskip("triton")

from kernels.test_triton_kernels import compiles, pointers  # noqa: E402


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


def test_the_kernels_compile_for_hopper():
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set: there is nothing to compile")
    from ostinato.kernels.sampling.filters.triton_narrow import narrow
    from ostinato.kernels.sampling.filters.triton_settle import settle

    floats = (
        "logits",
        "temperature",
        "top_p",
        "min_p",
        "group_best",
        "block_best",
        "block_sum",
        "block_lead",
    )
    types = pointers(torch.float32, *floats, "range_sums", "sums", "cut")
    types |= pointers(torch.float32, "drawn", "before")
    integers = (
        "rows",
        "top_k",
        "ranges",
        "counts",
        "segments",
        "hits",
        "found",
        "cut_at",
        "drawn_at",
        "verdicts",
        "arrived",
    )
    types |= dict.fromkeys(integers, "*i32")
    constants = {"width": 151_936, "block": 4096, "group": 128, "greedy_below": 1e-5, "parts_block": 64}
    constants |= {"segment": 256, "capacity": 2048, "few": 256, "group_block": 2048, "last_pass": 3}
    constants["pivot_block"] = 2048
    for kernel, more in (
        (narrow, {"is_last": False}),
        (narrow, {"is_last": True}),
        (settle, {}),
    ):
        typed = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        fixed = {name: value for name, value in constants.items() if name in kernel.arg_names}
        assert compiles(kernel, typed, fixed | more, num_warps=8)
