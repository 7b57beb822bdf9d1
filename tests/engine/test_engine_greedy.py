"""Greedy output equals that of transformers, token for token, however the work is cut up and run.

Every test also says which graph serves how many steps (`expected_steps`), so none passes by running eagerly.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.small_models import FAMILIES, saved_model
from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams

from .conftest import STEPS_AHEAD, TinyModel, prompts_of
from .expected_steps import Setup, computed_tokens, sampling_of, service_of

LENGTHS = (3, 21, 1, 40, 17)
TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)
SMALL: dict[str, Any] = {
    "max_model_len": 64,
    "max_running_requests": 4,
    "chunked_prefill_size": 16,
    "cuda_graph_prefill_tokens": [8, 16],
    "num_pages": 40,
    "enable_cudagraph_gc": True,  # freezing it collects first, which takes longer than these captures
}
MODES = {
    # mode: replayed modes, eager reasons
    "none": (set(), {"disabled"}),
    "piecewise": ({"piecewise"}, set()),
    "full": ({"full"}, set()),
    "full-decode-only": ({"full"}, {"mixed-batch"}),
    "full-and-piecewise": ({"full", "piecewise"}, set()),
}
WHOLE = Setup(token_rungs=(16, 64), chunked=False)


def served(llm: LLM) -> tuple[set[str], set[str]]:
    """Modes that were replayed, and reasons of eager steps."""
    report = llm.graph_report()
    assert not report.failures
    return {row.mode for row in report.graphs if row.replays}, set(report.eager_steps)


def assert_right(llm: LLM, model: TinyModel, prompts: list[dict[str, list[int]]]) -> None:
    outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.error is None
        assert output.prompt_token_ids == prompt["prompt_token_ids"]
        assert output.outputs[0].token_ids == model.greedy(tuple(prompt["prompt_token_ids"]), TOKENS)
        assert output.outputs[0].finish_reason == "length"
    assert_all_back(llm)


def assert_right_and_replayed(
    llm: LLM,
    setup: Setup,
    model: TinyModel,
    prompts: list[dict[str, list[int]]],
    cached: Sequence[int] | None = None,
) -> None:
    """The tokens of transformers, from exactly the graphs, as often, and eagerly for exactly the reasons."""
    before, before_sampling = service_of(llm), sampling_of(llm)
    assert_right(llm, model, prompts)
    steps = setup.steps([len(prompt["prompt_token_ids"]) for prompt in prompts], TOKENS, cached)
    assert service_of(llm).since(before) == setup.service(steps)
    assert sampling_of(llm).since(before_sampling) == setup.sampling(steps)


def assert_all_back(llm: LLM) -> None:
    scheduler = llm.engine.core.scheduler
    llm.engine.core.settle()  # a step ahead may be under way, for nobody
    assert not scheduler.has_work
    assert not llm.engine.has_work
    scheduler.check_integrity()
    assert scheduler.pages.num_free == scheduler.pages.num_usable


def found_in_cache(prompts: list[dict[str, list[int]]]) -> list[int]:
    """Tokens of the full pages before each prompt's last token."""
    return [(len(prompt["prompt_token_ids"]) - 1) // 16 * 16 for prompt in prompts]


@pytest.mark.parametrize(
    ("mode", "setup"),
    [
        *(pytest.param(mode, Setup(), id=f"chunked-{mode}") for mode in MODES),
        *(
            pytest.param(mode, WHOLE, id=f"whole-{mode}", marks=() if mode == "full" else pytest.mark.slow)
            for mode in MODES
        ),
    ],
)
def test_every_mode_batched_and_one_by_one(tiny: TinyModel, mode: str, setup: Setup) -> None:
    setup = replace(setup, mode=mode)
    with LLM(tiny.directory, **setup.options) as llm:
        prompts = prompts_of(LENGTHS)
        assert_right_and_replayed(llm, setup, tiny, prompts)
        # The same prompts again, one by one, then together: their full pages are in the prefix cache.
        for prompt, hit in zip(prompts, found_in_cache(prompts), strict=True):
            assert_right_and_replayed(llm, setup, tiny, [prompt], [hit])
        assert_right_and_replayed(llm, setup, tiny, prompts, found_in_cache(prompts))
        assert served(llm) == MODES[mode]


@pytest.mark.parametrize("mode", ["none", "full", "full-and-piecewise"])
def test_without_prefix_caching_everything_is_computed_again(tiny: TinyModel, mode: str) -> None:
    setup = Setup(mode=mode, caching=False)
    with LLM(tiny.directory, **setup.options) as llm:
        for _ in range(2):
            assert_right_and_replayed(llm, setup, tiny, prompts_of((40, 33, 5)))
        [output] = llm.generate(prompts_of((40,)), GREEDY)
        assert output.num_cached_tokens == 0


@pytest.mark.parametrize("mode", MODES)
def test_one_step_ahead(tiny: TinyModel, mode: str) -> None:
    setup = Setup(mode=mode, ahead=1)
    with LLM(tiny.directory, **setup.options) as llm:
        assert_right_and_replayed(llm, setup, tiny, prompts_of(LENGTHS))


@pytest.mark.parametrize("mode", MODES)
def test_preemption_changes_nothing(tiny: TinyModel, mode: str) -> None:
    setup = Setup(mode=mode, pages=7, caching=False)
    prompts = prompts_of((30, 28, 31, 14, 29), seed=8)
    with LLM(tiny.directory, **setup.options) as llm:
        assert_right_and_replayed(llm, setup, tiny, prompts)
        assert llm.engine.core.scheduler.num_preemptions > 0
        if not MODES[mode][1]:
            once = sum(len(prompt["prompt_token_ids"]) + TOKENS - 1 for prompt in prompts)
            assert computed_tokens(llm) > once, "a preempted request is computed again"


@pytest.mark.parametrize("mode", ["none", "full", "full-and-piecewise"])
@pytest.mark.parametrize("ahead", STEPS_AHEAD)
def test_preemption_with_prefix_hits_and_one_step_ahead(tiny: TinyModel, mode: str, ahead: int) -> None:
    setup = Setup(mode=mode, pages=7, ahead=ahead)
    with LLM(tiny.directory, **setup.options) as llm:
        first, *others = prompts_of((30, 28, 31, 14, 29), seed=8)
        beginning = first["prompt_token_ids"][:16]
        prompts = [first, *({"prompt_token_ids": beginning + it["prompt_token_ids"][16:]} for it in others)]
        outputs = [llm.engine.add(prompt, GREEDY) for prompt in prompts]
        turns = 0
        while llm.engine.has_work:
            llm.engine.step()
            turns += 1
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.outputs[0].token_ids == tiny.greedy(tuple(prompt["prompt_token_ids"]), TOKENS)
        scheduler = llm.engine.core.scheduler
        assert scheduler.num_preemptions > 0
        assert scheduler.pages.statistics.hit_tokens > 0
        # Every turn launches a step; one step ahead, a turn may also wait for the last one alone.
        assert turns - len(prompts) * ahead <= service_of(llm).steps <= turns - ahead
        assert served(llm) == MODES[mode]
        assert_all_back(llm)


def test_padded_decode_counts_its_padding(tiny: TinyModel) -> None:
    setup = Setup(mode="full-decode-only", decode_rungs=(4,))
    with LLM(tiny.directory, **setup.options) as llm:
        assert_right_and_replayed(llm, setup, tiny, prompts_of((5, 6, 4)))
        [decode] = [row for row in llm.graph_report().graphs if row.num_tokens == 4]
        assert decode.replays == TOKENS - 1
        assert decode.padding_waste == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ({"disable_cuda_graph": True}, {"disabled": TOKENS + 1}),
        (
            {"cuda_graph_mode": "full-decode-only", "cuda_graph_max_bs": 2},
            {"mixed-batch": 2, "larger-than-max": TOKENS - 2},
        ),
        ({"cuda_graph_max_bs": 2}, {}),
        (
            {"cuda_graph_mode": "full-decode-only", "cuda_graph_bs": [4], "disable_cuda_graph_padding": True},
            {"mixed-batch": 2, "padding-disabled": TOKENS - 1},
        ),
    ],
)
def test_what_has_no_graph_runs_eagerly_and_says_why(
    tiny: TinyModel, options: dict[str, Any], reasons: dict[str, int]
) -> None:
    with LLM(tiny.directory, **SMALL, **options) as llm:
        # 18 tokens of prompt in steps of 16: all of the first two and most of the third; then its rest
        # beside two decodes; then three decodes together; then the third one's last token alone.
        assert_right(llm, tiny, prompts_of((5, 6, 7)))
        service = service_of(llm)
        assert service.eager == reasons
        assert service.steps == TOKENS + 1


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("Mistral", {"sliding_window": 9}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {"head_dim": 16}),
    ],
)
def test_families(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    model = TinyModel(tmp_path, family, **fields)
    for mode in ("full", "full-and-piecewise"):
        setup = Setup(mode=mode)
        with LLM(model.directory, **setup.options) as llm:
            assert_right_and_replayed(llm, setup, model, prompts_of(LENGTHS))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_every_mode(tmp_path: Path, family: str) -> None:
    """Tied or not, biases, windows on some layers, every rope; norms and biases random too."""
    reference = saved_model(family, tmp_path, eos_token_id=None, bos_token_id=None)
    model = TinyModel.saved(tmp_path, reference)
    prompts = prompts_of(LENGTHS, vocabulary=reference.config.vocab_size)
    for mode in MODES:
        setup = Setup(mode=mode)
        with LLM(model.directory, **setup.options) as llm:
            assert_right_and_replayed(llm, setup, model, prompts)
            assert_right_and_replayed(llm, setup, model, prompts, found_in_cache(prompts))


def test_a_prompt_many_times_the_ladder_has_no_eager_step(tiny: TinyModel) -> None:
    setup = Setup(length=128)
    with LLM(tiny.directory, **setup.options) as llm:
        assert_right_and_replayed(llm, setup, tiny, prompts_of((100,)))
        # 6 chunks of 16, one of 4, then a token at a time.
        assert service_of(llm).replays == {
            ("piecewise", "mixed", 16): 6,
            ("piecewise", "mixed", 8): 1,
            ("full", "decode", 1): TOKENS - 1,
        }
