"""`embed` gives the vectors of transformers, from replayed graphs."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import RequestError, SamplingParams

from .conftest import TINY, TinyModel, prompts_of
from .expected_steps import Setup, sampling_of, service_of
from .test_engine_greedy import WHOLE, assert_all_back, found_in_cache

LENGTHS = (7, 40, 1, 16, 17, 33)


def expected_vector(reference: torch.nn.Module, ids: list[int], pooling: str) -> torch.Tensor:
    with torch.no_grad():
        states = reference(torch.tensor([ids])).last_hidden_state[0]
    return states[-1] if pooling == "last" else states.mean(0)


def assert_same_vectors(
    llm: LLM, reference: torch.nn.Module, prompts: list[dict[str, list[int]]], pooling: str
) -> None:
    outputs = llm.embed(prompts, pooling=pooling)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.error is None
        assert output.prompt_token_ids == prompt["prompt_token_ids"]
        expected = expected_vector(reference, prompt["prompt_token_ids"], pooling)
        found = torch.tensor(output.embedding)
        assert torch.cosine_similarity(found, expected, dim=0) > 0.9999
        assert found.norm() == pytest.approx(1.0, abs=1e-5)
    assert_all_back(llm)


@pytest.mark.parametrize(
    "setup",
    [
        *(Setup(mode=mode) for mode in ("piecewise", "full", "full-and-piecewise")),
        *(pytest.param(Setup(mode=mode), marks=pytest.mark.slow) for mode in ("none", "full-decode-only")),
        pytest.param(replace(WHOLE, mode="full"), marks=pytest.mark.slow),
        WHOLE,
    ],
    ids=lambda setup: f"{'chunked' if setup.chunked else 'whole'}-{setup.mode}",
)
def test_vectors_are_those_of_transformers_in_every_mode(tiny: TinyModel, setup: Setup) -> None:
    prompts = prompts_of(LENGTHS)
    with LLM(tiny.directory, **setup.options) as llm:
        for pooling in ("last", "mean"):
            before = service_of(llm)
            assert_same_vectors(llm, tiny.reference.model, prompts, pooling)
            # Pooling needs every state, so nothing comes from the prefix cache the second time.
            assert service_of(llm).since(before) == setup.service(setup.steps(LENGTHS, 0))
        # Decode graphs serve no prompt; every other mode but none replays.
        assert (service_of(llm).replays == {}) == (setup.mode in ("none", "full-decode-only"))
        assert sampling_of(llm).steps == 0


def test_embedding_between_generations(tiny: TinyModel) -> None:
    """An embedding leaves its prompt's pages to later generations, and disturbs none."""
    setup = Setup()
    prompts = prompts_of((40, 17))
    greedy = SamplingParams(temperature=0, max_tokens=5)
    with LLM(tiny.directory, **setup.options) as llm:
        assert_same_vectors(llm, tiny.reference.model, prompts, "mean")
        outputs = llm.generate(prompts, greedy)
        for prompt, output, hit in zip(prompts, outputs, found_in_cache(prompts), strict=True):
            assert output.outputs[0].token_ids == tiny.greedy(tuple(prompt["prompt_token_ids"]), 5)
            assert output.num_cached_tokens == hit
        assert_same_vectors(llm, tiny.reference.model, prompts, "last")
        assert service_of(llm).eager == {}


def test_embeddings_survive_preemption(tiny: TinyModel) -> None:
    """Long embeddings beside generations in a cache that is too small for all of them."""
    setup = Setup(pages=7, ahead=1)
    with LLM(tiny.directory, **setup.options) as llm:
        writing = [
            llm.engine.add(prompt, SamplingParams(temperature=0, max_tokens=25))
            for prompt in prompts_of((14, 15, 13), seed=2)
        ]
        [prompt] = prompts_of((60,), seed=9)
        assert_same_vectors(llm, tiny.reference.model, [prompt], "mean")
        assert all(output.finished for output in writing)
        assert llm.engine.core.scheduler.num_preemptions > 0
        assert service_of(llm).eager == {}


def test_the_host_gets_one_vector_of_a_prompt_and_no_states(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunk by chunk, several in one step, in rows that others had before."""
    copied: list[tuple[int, ...]] = []
    to_host, copy = torch.Tensor.cpu, torch.Tensor.copy_

    def counted_to_host(self: torch.Tensor) -> torch.Tensor:
        copied.append(tuple(self.shape))
        return to_host(self)

    def counted_copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:
            copied.append(tuple(source.shape))
        return copy(self, source, non_blocking)

    prompts = prompts_of((60, 3, 40, 16, 33, 50, 1, 2), seed=4)
    with LLM(tiny.directory, **Setup().options) as llm:
        monkeypatch.setattr(torch.Tensor, "cpu", counted_to_host)
        monkeypatch.setattr(torch.Tensor, "copy_", counted_copy)
        found = {pooling: llm.embed(prompts, pooling=pooling) for pooling in ("mean", "last")}
        monkeypatch.undo()
        assert copied == [(2, 32)] * 2 * len(prompts), "each its own line"
        for pooling, outputs in found.items():
            for prompt, output in zip(prompts, outputs, strict=True):
                expected = expected_vector(tiny.reference.model, prompt["prompt_token_ids"], pooling)
                assert torch.cosine_similarity(torch.tensor(output.embedding), expected, dim=0) > 0.9999


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_a_checkpoint_without_an_output_layer_embeds_and_refuses_to_generate(
    tmp_path: Path, family: str
) -> None:
    import transformers

    fields = {**TINY, "head_dim": 16} if family == "Qwen3" else TINY
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**fields)
    reference = getattr(transformers, f"{family}Model")(config).eval()
    reference.save_pretrained(tmp_path)
    setup = Setup()
    prompts = prompts_of(LENGTHS)
    with LLM(str(tmp_path), **setup.options) as llm:
        assert_same_vectors(llm, reference, prompts, "last")
        assert service_of(llm) == setup.service(setup.steps(LENGTHS, 0))
        assert llm.sampling_report() is None
        with pytest.raises(RequestError, match=rf"{family}Model has no output layer.*use embed"):
            llm.generate(prompts[0], SamplingParams())
        assert_same_vectors(llm, reference, prompts[:1], "mean")


def test_a_bad_prompt_does_not_disturb_the_others(tiny: TinyModel) -> None:
    good = prompts_of((5, 20))
    bad = [{"prompt_token_ids": []}, {"prompt_token_ids": [131]}, prompts_of((65,))[0]]
    with LLM(tiny.directory, **Setup().options) as llm:
        outputs = llm.embed([good[0], *bad, good[1]])
        for prompt, output in zip(good, (outputs[0], outputs[-1]), strict=True):
            expected = expected_vector(tiny.reference.model, prompt["prompt_token_ids"], "last")
            assert torch.cosine_similarity(torch.tensor(output.embedding), expected, dim=0) > 0.9999
        messages = ["empty", "vocabulary", "cannot fit"]
        for output, message in zip(outputs[1:-1], messages, strict=True):
            assert output.embedding == []
            assert message in (output.error or "")
        for refused, message in zip(bad, messages, strict=True):
            with pytest.raises(RequestError, match=message):
                llm.embed(refused)
        with pytest.raises(RequestError, match="unknown pooling 'max': use last or mean"):
            llm.embed(good, pooling="max")
        [exact] = llm.embed(prompts_of((64,)))  # a prompt as long as the model: nothing is generated
        assert math.isclose(sum(value * value for value in exact.embedding), 1.0, abs_tol=1e-5)
        assert_all_back(llm)
