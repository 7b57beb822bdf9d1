"""Row 0 and page 0 belong to padding: no step changes the one's state, nothing real depends on the other."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.parameters.sampling_params import SamplingParams

from .conftest import STEPS_AHEAD, TinyModel, prompts_of
from .expected_steps import Setup, sampling_of, service_of
from .reserved_state import tensors_with
from .test_engine_greedy import assert_all_back

# 7 rows and 37 pages: sizes that nothing else in this engine has.
ROWS, PAGES = 7, 37
PADDED = Setup(
    decode_rungs=(4, 6), token_rungs=(8, 16), running=ROWS - 1, pages=PAGES, length=128, caching=False
)
# Every kind of state that sampling keeps per row, and every sampling graph.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.9, "seed": 2, "top_k": 20, "top_p": 0.9},
    {"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 3, "logit_bias": {5: 2.0}, "min_tokens": 9, "logprobs": 2},
]
LARGE = 3.0e4


def row_zero(llm: LLM) -> dict[str, torch.Tensor]:
    found = {name: tensor[0].clone() for name, tensor in tensors_with(llm, ROWS).items()}
    assert any("page_table" in name for name in found)
    assert len(found) >= 10, "the state of rows is not where it is looked for"
    return found


def assert_equal(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    assert before.keys() == after.keys()
    for name, state in before.items():
        assert torch.equal(state, after[name]), name


def pages_zero(llm: LLM) -> list[torch.Tensor]:
    found = [tensor[0] for tensor in tensors_with(llm, PAGES).values() if tensor.is_floating_point()]
    assert len(found) == 2 * 2, "keys and values of two layers"
    return found


def run_padded(llm: LLM, calls: int, tokens: int) -> None:
    """Three requests in graphs for four, of changing kinds, their prompts in chunks with padding."""
    for call in range(calls):
        prompts = prompts_of((3, 21, 9), seed=call)
        params = [
            SamplingParams(**KINDS[(call + at) % len(KINDS)], max_tokens=tokens, ignore_eos=True)
            for at in range(3)
        ]
        outputs = llm.generate(prompts, params)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [tokens] * 3
        # Page 0 has no owner and no request was ever given it.
        assert_all_back(llm)


def stepwise(llm: LLM, seed: int) -> Iterator[list[RequestOutput]]:
    """Five requests in graphs for six, step by step; the outputs grow in place."""
    prompts = prompts_of((3, 40, 1, 18, 33), seed=seed)
    params = [
        SamplingParams(**{**kind, "logprobs": 5}, max_tokens=25, ignore_eos=True, prompt_logprobs=1)
        for kind in KINDS
    ]
    outputs = [llm.engine.add(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    while llm.engine.has_work:
        llm.engine.step()
        yield outputs


def check_row_zero(model: TinyModel, calls: int, tokens: int, ahead: int) -> int:
    """Padded steps that were replayed; afterwards row 0 is as it was before the first."""
    setup = Setup(**{**vars(PADDED), "ahead": ahead})
    with LLM(model.directory, **setup.options) as llm:
        before = row_zero(llm)
        run_padded(llm, calls, tokens)
        assert_equal(before, row_zero(llm))
        steps = setup.steps((3, 21, 9), tokens) * calls
        assert service_of(llm) == setup.service(steps)
        # Two of three requests may be plain, and the first or last ones of a call: then nobody asks for more.
        most = setup.sampling(steps, is_plain=False)
        assert sampling_of(llm).eager == most.eager == {}
        assert 0.98 * most.steps < sampling_of(llm).steps <= most.steps
        decode = [row for row in llm.graph_report().graphs if row.replays and row.num_tokens == 4]
        assert all(row.padding_waste > 0.2 for row in decode)
        for _ in stepwise(llm, seed=1):  # between any two steps, not only at the end
            assert_equal(before, row_zero(llm))
        return sum(row.replays for row in decode)


def test_row_0_is_untouched_after_75_padded_steps(tiny: TinyModel) -> None:
    assert check_row_zero(tiny, calls=1, tokens=100, ahead=1) >= 75


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ahead", STEPS_AHEAD)
def test_row_0_is_untouched_after_10000_padded_steps(tiny: TinyModel, ahead: int) -> None:
    assert check_row_zero(tiny, calls=102, tokens=100, ahead=ahead) >= 10_000


@pytest.mark.parametrize(
    "mode",
    [*(pytest.param(mode, marks=pytest.mark.slow) for mode in ("piecewise", "full")), "full-and-piecewise"],
)
def test_what_page_0_holds_reaches_no_output(tiny: TinyModel, mode: str) -> None:
    setup = Setup(**{**vars(PADDED), "mode": mode})
    with LLM(tiny.directory, **setup.options) as llm:
        [*_, plain] = stepwise(llm, seed=4)
        for poison in (LARGE, -LARGE):
            for page in pages_zero(llm):
                page.fill_(poison)
            poisoned: list[RequestOutput] = []
            for outputs in stepwise(llm, seed=4):
                for page in pages_zero(llm):
                    page.fill_(poison)
                poisoned = outputs
            for before, after in zip(plain, poisoned, strict=True):
                # Bit for bit: the same graphs ran on the same numbers.
                assert before.outputs[0].token_ids == after.outputs[0].token_ids
                assert before.outputs[0].logprobs == after.outputs[0].logprobs
                assert before.prompt_logprobs == after.prompt_logprobs
        assert_all_back(llm)
        assert service_of(llm).replays
        assert service_of(llm).eager == {}


def test_page_0_is_owned_by_nobody_at_any_step(tiny: TinyModel) -> None:
    setup = Setup(**{**vars(PADDED), "pages": 11, "length": 64})
    with LLM(tiny.directory, **setup.options) as llm:
        scheduler = llm.engine.core.scheduler
        for _ in stepwise(llm, seed=6):
            scheduler.check_integrity()
            assert all(0 not in request.pages for request in scheduler.running)
            assert all(request.row != 0 for request in scheduler.running)
        assert scheduler.num_preemptions > 0
        assert_all_back(llm)
