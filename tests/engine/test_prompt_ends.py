"""Few tokens of one prompt, all else of it cached: the same tokens, from graphs for one request."""

from dataclasses import replace
from typing import Any

import pytest

from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams
from ostinato.graphs import GraphKey
from ostinato.kernels.attention import AttentionBatch, backend

from .conftest import TinyModel, prompts_of
from .test_engine_greedy import assert_all_back

TOKENS = 5
OPTIONS: dict[str, Any] = {
    "max_model_len": 128,
    "max_running_requests": 4,
    "chunked_prefill_size": 32,
    "cuda_graph_bs": (1, 4),
    "cuda_graph_prefill_tokens": (8, 16, 32),
    "cuda_graph_mode": "full",
    "num_pages": 80,
    "enable_cudagraph_gc": True,
}


@pytest.fixture(autouse=True)
def placed(monkeypatch: pytest.MonkeyPatch) -> list[AttentionBatch]:
    """As if the backend had a kernel for 16 tokens of a request; the batches that it was to be for."""
    batches: list[AttentionBatch] = []
    attend = backend.TORCH.attend

    def noting(q: Any, k_cache: Any, v_cache: Any, batch: AttentionBatch, **options: Any) -> Any:
        if batch.equal_places and batch.max_query_len > 1:
            batches.append(batch)
        return attend(q, k_cache, v_cache, batch, **options)

    has_kernel = replace(backend.TORCH, attend=noting, most_places=lambda *_: 16)
    monkeypatch.setattr(backend, "TORCH", has_kernel)
    return batches


def keys_alone(llm: LLM) -> list[GraphKey]:
    keys = llm.engine.core.runner.graphs.graphs
    return [key for key in keys if not key.descriptor.is_uniform and key.descriptor.num_reqs == 1]


def replays(llm: LLM) -> dict[str, int]:
    rows = [row for row in llm.graph_report().graphs if "mixed" in row.descriptor]
    return {row.descriptor.split(" context")[0]: row.replays for row in rows}


def assert_tokens(llm: LLM, model: TinyModel, prompts: list[dict[str, list[int]]]) -> None:
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=TOKENS))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == model.greedy(tuple(prompt["prompt_token_ids"]), TOKENS)
    assert_all_back(llm)


def ends(shared: int, own: tuple[int, ...]) -> list[dict[str, list[int]]]:
    """Prompts that begin with the same `shared` tokens."""
    [first, *rest] = prompts_of((shared, *own), seed=5)
    return [{"prompt_token_ids": first["prompt_token_ids"] + one["prompt_token_ids"]} for one in rest]


def test_the_end_of_a_prompt_runs_from_a_graph_for_one(tiny: TinyModel, placed: list[AttentionBatch]) -> None:
    first, *prompts = ends(64, (1, 16, 11, 5, 1, 8))
    with LLM(tiny.directory, **OPTIONS) as llm:
        assert [key.descriptor.num_tokens for key in keys_alone(llm)] == [16, 8]
        for batch in placed:
            assert batch.req_rows.size(0) == 1
            assert batch.token_rows.size(0) == batch.max_query_len in (8, 16)
        assert {batch.max_query_len for batch in placed} == {8, 16}
        assert_tokens(llm, tiny, [first])
        before = replays(llm)
        for prompt in prompts:
            assert_tokens(llm, tiny, [prompt])
        after = replays(llm)
        more = {name: count - before[name] for name, count in after.items() if count > before[name]}
        assert more == {"mixed 16 tokens/1 reqs": 2, "mixed 8 tokens/1 reqs": 3}
        assert not llm.graph_report().eager_steps


def test_several_prompts_at_once_are_no_such_step(tiny: TinyModel) -> None:
    first, *prompts = ends(64, (1, 7, 9))
    with LLM(tiny.directory, **OPTIONS) as llm:
        assert_tokens(llm, tiny, [first])
        before = replays(llm)
        assert_tokens(llm, tiny, prompts)
        assert replays(llm)["mixed 16 tokens/4 reqs"] == before["mixed 16 tokens/4 reqs"] + 1
        assert replays(llm)["mixed 16 tokens/1 reqs"] == before["mixed 16 tokens/1 reqs"]


def test_without_a_graph_nothing_is_said_of_places(tiny: TinyModel, placed: list[AttentionBatch]) -> None:
    """A kernel would be compiled for every number of tokens, while somebody waits."""
    with LLM(tiny.directory, **OPTIONS | {"cuda_graph_mode": "none"}) as llm:
        for prompt in ends(64, (1, 16, 11)):
            assert_tokens(llm, tiny, [prompt])
    assert not placed


def test_one_shape_stays_one(tiny: TinyModel) -> None:
    """With `batch_invariant` bits must not depend on who else is there."""
    kept = {name: OPTIONS[name] for name in ("max_model_len", "num_pages", "max_running_requests")}
    with LLM(tiny.directory, **kept, chunked_prefill_size=16, batch_invariant=True) as llm:
        [key] = llm.engine.core.runner.graphs.graphs
        assert key.descriptor.num_reqs == 4


def test_they_can_be_verified(tiny: TinyModel) -> None:
    with LLM(tiny.directory, **OPTIONS) as llm:
        llm.verify(progress=False)
