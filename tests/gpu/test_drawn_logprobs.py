"""Log-probabilities of the distribution that tokens are drawn from, on CUDA."""

from collections.abc import Iterator

import pytest

from engine.conftest import TinyModel, prompts_of, tiny  # noqa: F401
from engine.test_drawn_logprobs import CASES, OPTIONS, asking, check
from ostinato import LLM

NEAR = 0.03
"""Kernels round otherwise than transformers on a CPU does, and at the edge of top-p a token comes or goes."""


@pytest.fixture(scope="module")
def llm(tiny: TinyModel) -> Iterator[LLM]:  # noqa: F811
    with LLM(tiny.directory, logprobs_mode="processed_logprobs", **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_in_one_batch(tiny: TinyModel, steps_ahead: int) -> None:  # noqa: F811
    prompts = prompts_of([5 + at for at in range(len(CASES))])
    params = [asking(case, logprobs=at % 4) for at, case in enumerate(CASES.values())]
    options = {**OPTIONS, "logprobs_mode": "processed_logprobs", "steps_ahead": steps_ahead}
    with LLM(tiny.directory, **options) as llm:
        for _ in range(2):
            for at, (output, case) in enumerate(
                zip(llm.generate(prompts, params), CASES.values(), strict=True)
            ):
                check(tiny, output, case, at % 4, NEAR)


def test_of_the_whole_vocabulary(llm: LLM, tiny: TinyModel) -> None:  # noqa: F811
    names = ("the model's own", "cooler", "penalties and heat", "bias", "a function")
    params = [asking(CASES[name], logprobs=-1) for name in names]
    for name, output in zip(names, llm.generate(prompts_of([7] * len(names)), params), strict=True):
        check(tiny, output, CASES[name], 131, NEAR)
