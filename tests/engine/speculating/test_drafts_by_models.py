"""Drafts of heads and of smaller models: greedy tokens are those without, at every acceptance length."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from engine.test_engine_greedy import assert_all_back
from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams

from . import walks

DRAFTS = 3
SMALL: dict[str, Any] = {
    "max_model_len": 96,
    "max_running_requests": 4,
    "chunked_prefill_size": 16,
    "cuda_graph_bs": (1, 4),
    "cuda_graph_prefill_tokens": (16,),
    "num_pages": 60,
    "enable_cudagraph_gc": True,
}
GREEDY = SamplingParams(temperature=0, max_tokens=40)
METHODS = ("eagle", "eagle3", "draft_model")
MODES = ("full", "full-decode-only", "full-and-piecewise", "piecewise", "none")
OFTEN = {
    ("eagle", "full"),
    ("eagle3", "piecewise"),
    ("draft_model", "full-and-piecewise"),
    ("eagle3", "none"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of the target and of its drafts."""
    place = tmp_path_factory.mktemp("walks")
    drafts = {method: walks.save_draft(method, place / method) for method in METHODS}
    return {"target": walks.save_target(place / "target"), **drafts}


def drafting(saved: dict[str, str], method: str, **options: Any) -> LLM:
    asked = {"method": method, "model": saved[method], "num_speculative_tokens": DRAFTS}
    asked |= {"disable_adaptive": True, **options.pop("speculative_config", {})}
    return LLM(saved["target"], speculative_config=asked, **{**SMALL, **options})


SETUPS = [
    pytest.param(
        (method, mode), id=f"{method}-{mode}", marks=[] if (method, mode) in OFTEN else [pytest.mark.slow]
    )
    for method in METHODS
    for mode in MODES
]


@pytest.fixture(scope="module", params=SETUPS)
def engine(request: pytest.FixtureRequest, saved: dict[str, str]) -> Iterator[LLM]:
    method, mode = request.param
    with drafting(saved, method, cuda_graph_mode=mode, steps_ahead=int(method != "eagle3")) as llm:
        yield llm


def test_every_acceptance_length_occurs_and_tokens_stay_the_same(engine: LLM) -> None:
    prompts = [[t, t + 1, start] for t, start in enumerate((5, 12, 33))] + [list(range(1, 38))]
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
    single = engine.generate({"prompt_token_ids": [2, 40]}, GREEDY, use_tqdm=False)
    for prompt, output in zip([*prompts, [2, 40]], [*outputs, *single], strict=True):
        assert output.outputs[0].token_ids == walks.walk(prompt[-1], 40)
    speculation = engine.engine.core.runner.speculation
    assert speculation is not None
    found = speculation.counts.read()
    accepted = (found.num_drafts, *found.accepted_per_position, 0)
    lengths = [more - less for more, less in pairwise(accepted)]
    assert len(lengths) == DRAFTS + 1
    assert all(count > 0 for count in lengths), lengths
    assert found.num_accepted_tokens > 0.4 * found.num_draft_tokens
    assert_all_back(engine)
    chains = speculation.drafter.graphs
    if engine.engine.core.config.config.cuda_graph_mode == "none":
        assert dict(chains.eager_steps) == {"disabled": chains.eager_steps.total()}
    else:
        assert not chains.eager_steps
        assert sum(graph.replays for graph in chains.graphs.values()) > 10
