"""Requests that ask for more: kernels in the interpreter and for Hopper, and the reference."""

from typing import Any

import pytest
import torch

from kernels.asked_rows import nothing_asked
from kernels.asking_checks import AskingCase, check_untouched
from kernels.filter_checks import logits_of
from kernels.interpreted import assert_passes
from kernels.test_triton_kernels import compiles
from ostinato.kernels.sampling import asking_rows
from ostinato.kernels.sampling.token_lines import LINE_HEAD

triton = pytest.importorskip("triton")


@pytest.mark.parametrize(
    "which", ["few", pytest.param("all", marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_kernels_are_right_in_the_interpreter(which: str) -> None:
    assert_passes("kernels.asking_interpreter_checks", which, 110 if which == "few" else 580)


FIELDS = dict.fromkeys(("temperature", "top_p", "min_p", "repetition", "presence", "frequency"), "*fp32")
FIELDS |= dict.fromkeys(("rows", "places", "lengths", "top_k", "num_logprobs", "num_biases"), "*i32")
FIELDS |= {"seeds": "*i64", "bias_ids": "*i32", "bias_values": "*fp32", "banned": "*i32"}
FIELDS |= {"banned_before": "*i32", "generated": "*i32", "in_prompt": "*u8", "masks": "*i32"}
FIELDS |= dict.fromkeys(
    ("logits", "adjusted", "group_best", "block_best", "block_sum", "block_lead"), "*fp32"
)
FIELDS |= {"drawn": "*fp32", "drawn_at": "*i32", "arrived": "*i32", "top": "*i64", "before": "*fp32"}
FIELDS |= dict.fromkeys(("range_sums", "sums", "cut"), "*fp32")
FIELDS |= dict.fromkeys(
    ("ranges", "segment_counts", "segments", "hits", "found", "cut_at", "verdicts"), "*i32"
)
FIELDS |= {"part_best": "*fp32", "part_sum": "*fp32", "part_rank": "*i32"}
FIELDS |= dict.fromkeys(("last_tokens", "ring", "counts", "tokens", "ranks"), "*i64") | {"values": "*fp32"}
SIZES = {"width": 151_936, "block": 4096, "group": 128, "parts_block": 64, "greedy_below": 1e-5}
SIZES |= {"most_biases": 512, "most_banned": 16, "most_top": 32, "num_values": 21, "head": 4, "timed": True}
SIZES |= {"passes": 3, "segment": 256, "capacity": 2048, "few": 256, "tile": 4096, "pivot_tile": 2048}
SIZES |= {"group_block": 2048, "begin": 0, "end": 5, "meets": True, "draws": True}
KERNELS = ("adjusted", "adjusted and filtered", "amend", "amend and judge", "judge", "find cuts", "redraw")
KERNELS += ("redraw and return",)


def kernel_of(name: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """With constants and options that are its own."""
    from ostinato.kernels.sampling import triton_adjusted, triton_amend, triton_redraw
    from ostinato.kernels.sampling.filters import triton_candidate, triton_find_cuts, triton_meeting

    meeting = {"maxnreg": triton_meeting.MEETING_REGISTERS}
    adjusted, capped = triton_adjusted._adjusted_best_of_block, {"maxnreg": triton_adjusted._REGISTERS}
    return {
        "adjusted": (adjusted, {"has_filters": False}, capped),
        "adjusted and filtered": (adjusted, {"has_filters": True}, capped),
        "amend": (triton_amend._amend, {"has_filters": False}, {}),
        "amend and judge": (triton_amend._amend, {"has_filters": True}, {}),
        "judge": (triton_candidate._judge, {}, {}),
        "find cuts": (triton_find_cuts._find_cuts, {}, meeting),
        "redraw": (triton_redraw._redraw, {"returns": False}, meeting),
        "redraw and return": (triton_redraw._redraw, {"returns": True}, meeting),
    }[name]


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_hopper(name: str) -> None:
    kernel, own, options = kernel_of(name)
    types = {name: kind for name, kind in FIELDS.items() if name in kernel.arg_names}
    constants = {name: value for name, value in (SIZES | own).items() if name in kernel.arg_names}
    assert compiles(kernel, types, constants, num_warps=8, **options)


def test_who_does_not_ask_is_left_alone() -> None:
    """By the reference, on a CPU."""
    for seed in range(20):
        case = AskingCase.random(logits_of("spread", 9, 50, seed), 6, seed)
        check_untouched(case, case.sampled(by_kernels=False))


def test_together_and_alone_are_the_same_by_the_reference() -> None:
    case = AskingCase.random(logits_of("flat", 9, 50, 3), 8, 3)
    together = case.sampled(by_kernels=False)
    for one in case.one_by_one():
        alone = one.sampled(by_kernels=False)
        if one.rows:
            place = LINE_HEAD + int(one.places)
            assert alone.line[place] == together.line[place]


def test_the_order_is_bias_bans_penalties_grammar() -> None:
    """Token 0 may have a bias beside padding's (0, 0.0); a ban is stronger than a bias."""
    raw = torch.tensor([[1.0, -1.0, 2.0, 0.5]])
    asked = nothing_asked(2, 4)
    asked.num_biases[1] = 2
    asked.bias_ids[1, :2] = torch.tensor([0, 2])
    asked.bias_values[1, :2] = torch.tensor([3.0, 50.0])
    asked.banned[1, 0], asked.banned_before[1] = 2, 9
    asked.repetition[1], asked.in_prompt[1, :2] = 2.0, True
    asked.masks[1] = 0b0111
    found = asking_rows.adjusted(raw, torch.tensor([1]), asked)
    assert found.tolist() == [[2.0, -2.0, float("-inf"), float("-inf")]]
    asked.lengths[1] = 9
    assert asking_rows.adjusted(raw, torch.tensor([1]), asked)[0, 2] == 52.0
