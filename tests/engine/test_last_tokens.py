"""The last layer of a long prompt goes on with the last tokens alone: the same answers, from such graphs."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams
from ostinato.engine.stepping import planned_graphs, shared_prefix

from .conftest import TinyModel, prompts_of
from .test_engine_greedy import assert_all_back

TOKENS = 6
OPTIONS: dict[str, Any] = {
    "max_model_len": 128,
    "max_running_requests": 4,
    "chunked_prefill_size": 40,
    "cuda_graph_bs": (1, 4),
    "cuda_graph_prefill_tokens": (8, 16, 24, 32, 40),
    "cuda_graph_mode": "full",
    "num_pages": 80,
    "enable_cudagraph_gc": True,
}
LENGTHS = (70, 3, 33, 17, 100, 8)


@pytest.fixture(autouse=True)
def _from_16_tokens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_graphs, "_LEAST_TOKENS", 16)


@pytest.fixture(scope="module", params=["Llama", "Mistral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    window = {"sliding_window": 24} if request.param == "Mistral" else {}
    return TinyModel(tmp_path_factory.mktemp(request.param), request.param, **window)


@pytest.fixture
def llm(model: TinyModel) -> Iterator[LLM]:
    with LLM(model.directory, **OPTIONS) as llm:
        yield llm


def replays(llm: LLM) -> dict[tuple[str, bool], int]:
    """Of mixed graphs, by their size and whether they compute the last tokens alone."""
    found: dict[tuple[str, bool], int] = {}
    for row in llm.graph_report().graphs:
        if row.descriptor.startswith("mixed"):
            key = row.descriptor.split("/")[0], "last tokens" in row.descriptor
            found[key] = found.get(key, 0) + row.replays
    return found


def test_prompts_in_chunks_and_beside_decodes_get_the_tokens_of_transformers(
    llm: LLM, model: TinyModel
) -> None:
    prompts = prompts_of(LENGTHS)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=TOKENS))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == model.greedy(tuple(prompt["prompt_token_ids"]), TOKENS)
    served = replays(llm)
    assert served["mixed 40 tokens", True] > 2
    # All states, for whoever asks for them, are computed by the largest and by powers of two.
    whole = {size: count for (size, is_short), count in served.items() if not is_short}
    assert set(whole) == {f"mixed {n} tokens" for n in (8, 16, 32, 40)}
    assert {size for size, count in whole.items() if count} <= {"mixed 8 tokens"}
    assert {size for size, is_short in served if is_short} == {f"mixed {n} tokens" for n in (16, 24, 32, 40)}
    assert llm.graph_report().eager_steps == {}
    assert llm.verify(progress=False).passed
    assert_all_back(llm)


def test_who_asks_for_all_states_gets_them(llm: LLM, model: TinyModel) -> None:
    """Log-probabilities of prompts and embeddings, beside and between requests that do not ask."""
    plain = SamplingParams(temperature=0, max_tokens=TOKENS)
    asking = SamplingParams(temperature=0, max_tokens=TOKENS, prompt_logprobs=1)
    prompts = prompts_of((35, 20, 50, 30), seed=7)
    outputs = llm.generate(prompts, [plain, asking, plain, asking])
    served = replays(llm)
    assert served["mixed 40 tokens", False] > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = prompt["prompt_token_ids"]
        assert output.outputs[0].token_ids == model.greedy(tuple(ids), TOKENS)
        if output.prompt_logprobs is None:
            continue
        logprobs = model.reference(_row(ids)).logits[0].log_softmax(-1)
        for at, (token, entry) in enumerate(zip(ids[1:], output.prompt_logprobs[1:], strict=True)):
            assert entry[token].logprob == pytest.approx(float(logprobs[at, token]), abs=1e-4)
    [embedded] = llm.embed(prompts[:1])
    found = model.reference(_row(prompts[0]["prompt_token_ids"]), output_hidden_states=True)
    last = found.hidden_states[-1][0, -1]
    last = last / last.norm()
    assert embedded.outputs.embedding == pytest.approx(last.tolist(), abs=1e-4)
    assert llm.graph_report().eager_steps == {}


def test_every_size_has_all_states_where_nothing_is_padded(model: TinyModel) -> None:
    prompts = prompts_of((24, 40, 24))
    with LLM(model.directory, disable_cuda_graph_padding=True, **OPTIONS) as llm:
        for prompt in prompts:
            llm.embed(prompt)
        served = replays(llm)
        assert (served["mixed 24 tokens", False], served["mixed 40 tokens", False]) == (2, 1)
        assert llm.graph_report().eager_steps == {}


def test_they_miss_no_shared_prefix(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step that should have read a prefix once is counted, and no prompt behind it."""
    monkeypatch.setattr(shared_prefix, "LEAST_SAVED_BYTES", 1)
    [prompt, other] = prompts_of((60, 40))
    options = {**OPTIONS, "max_running_requests": 5, "cuda_graph_bs": (4, 5)}
    with LLM(model.directory, enable_cascade_attention=True, **options) as llm:
        runner = llm.engine.core.runner
        for key in list(runner.graphs.graphs):
            if key.descriptor.cascade:
                runner.graphs.drop(key)
        for _ in range(4):
            llm.engine.add(prompt, SamplingParams(temperature=0, max_tokens=20))
        for _ in range(12):
            llm.engine.step()
        missed = dict(runner.missed_cascades)
        assert bool(missed) == (model.reference.config.model_type == "llama")
        before = replays(llm)
        llm.engine.add(other, SamplingParams(temperature=0, max_tokens=1))
        llm.engine.step()
        assert replays(llm)["mixed 40 tokens", True] > before["mixed 40 tokens", True]
        assert runner.missed_cascades == missed
        while llm.engine.has_work:
            llm.engine.step()


def _row(ids: list[int]) -> torch.Tensor:
    return torch.tensor([ids])
