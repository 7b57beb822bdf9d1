"""Sampling parameters, stop conditions and logprobs through the whole engine."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams

from .conftest import TinyModel, prompts_of
from .test_engine_greedy import SMALL, assert_all_back

PROMPT = prompts_of((9,))[0]
IDS = tuple(PROMPT["prompt_token_ids"])


@pytest.fixture(scope="module")
def llm(tiny_text: TinyModel) -> Iterator[LLM]:
    with LLM(tiny_text.directory, **SMALL) as llm:
        yield llm


@pytest.fixture(autouse=True)
def everything_comes_back(llm: LLM) -> Iterator[None]:
    yield
    assert_all_back(llm)
    assert llm.graph_report().eager_steps == {}
    assert llm.engine.core.sampler is not None
    assert llm.sampling_report().eager_steps == {}


def tokens(llm: LLM, prompt: Any = PROMPT, **params: Any) -> list[int]:
    return llm.generate(prompt, SamplingParams(**params))[0].outputs[0].token_ids


def first_logits(model: TinyModel) -> torch.Tensor:
    return model.reference(torch.tensor([IDS])).logits[0, -1]


def test_seeds_repeat_and_do_not_depend_on_the_batch(llm: LLM) -> None:
    alone = tokens(llm, seed=3, max_tokens=12)
    assert alone == tokens(llm, seed=3, max_tokens=12)
    assert alone != tokens(llm, seed=4, max_tokens=12)
    company = [*prompts_of((5, 11), seed=2), PROMPT, *prompts_of((30, 2), seed=3)]
    params = [
        SamplingParams(temperature=0, max_tokens=7),
        SamplingParams(temperature=1.3, top_k=5, max_tokens=9),
        SamplingParams(seed=3, max_tokens=12),
        SamplingParams(logprobs=2, max_tokens=5),
        SamplingParams(presence_penalty=1.0, max_tokens=5),
    ]
    assert llm.generate(company, params)[2].outputs[0].token_ids == alone


def test_requests_without_a_seed_differ(llm: LLM) -> None:
    outputs = llm.generate([PROMPT] * 4, SamplingParams(temperature=1.5, max_tokens=8))
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 4


def test_n_completions_differ_and_the_first_is_that_of_n_1(llm: LLM) -> None:
    [output] = llm.generate(PROMPT, SamplingParams(n=3, seed=5, temperature=1.5, max_tokens=8))
    found = [completion.token_ids for completion in output.outputs]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(ids) for ids in found}) == 3
    assert found[0] == tokens(llm, seed=5, temperature=1.5, max_tokens=8)


def test_top_k_1_and_tiny_top_p_are_greedy(llm: LLM, tiny_text: TinyModel) -> None:
    greedy = tiny_text.greedy(IDS, 8)
    assert tokens(llm, top_k=1, max_tokens=8) == greedy
    assert tokens(llm, top_p=1e-6, max_tokens=8) == greedy
    assert tokens(llm, min_p=1.0, max_tokens=8) == greedy


def test_bias_forces_and_forbids(llm: LLM, tiny_text: TinyModel) -> None:
    assert tokens(llm, temperature=0, logit_bias={77: 100.0}, max_tokens=4) == [77] * 4
    best = int(first_logits(tiny_text).argmax())
    second = int(first_logits(tiny_text).topk(2).indices[1])
    assert tokens(llm, temperature=0, logit_bias={best: -100.0}, max_tokens=1) == [second]
    # The row's next tenant is not biased any more.
    assert tokens(llm, temperature=0, logprobs=0, max_tokens=1) == [best]


def test_penalties_follow_what_was_generated(llm: LLM) -> None:
    forced = tokens(llm, temperature=0, logit_bias={77: 30.0}, frequency_penalty=2.0, max_tokens=30)
    assert forced[0] == 77
    assert len(set(forced)) > 1
    plain = tokens(llm, temperature=0, max_tokens=30)
    repeated = tokens(llm, temperature=0, repetition_penalty=5.0, max_tokens=30)
    assert len(set(repeated)) > len(set(plain))


def test_logprobs_are_those_of_the_model(llm: LLM, tiny_text: TinyModel) -> None:
    params = SamplingParams(temperature=0.7, seed=1, logprobs=3, prompt_logprobs=2, max_tokens=5)
    [output] = llm.generate(PROMPT, params)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    ids = [*IDS, *completion.token_ids]
    expected = tiny_text.reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    for at, (token, found) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        row = expected[len(IDS) - 1 + at]
        assert token in found
        assert set(row.topk(3).indices.tolist()) <= set(found)
        for other, entry in found.items():
            assert entry.logprob == pytest.approx(row[other].item(), abs=1e-4)
            assert entry.rank == int((row > row[other]).sum()) + 1
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(IDS)
    for at, found in enumerate(output.prompt_logprobs[1:], start=1):
        assert found is not None
        assert found[IDS[at]].logprob == pytest.approx(expected[at - 1, IDS[at]].item(), abs=1e-4)
        assert len(found) in (2, 3)


def test_prompt_logprobs_of_a_chunked_prompt(llm: LLM, tiny_text: TinyModel) -> None:
    prompt = prompts_of((40,), seed=9)[0]
    for _ in range(2):  # the second time nothing may come from the prefix cache
        [output] = llm.generate(prompt, SamplingParams(temperature=0, prompt_logprobs=0, max_tokens=1))
        ids = prompt["prompt_token_ids"]
        expected = tiny_text.reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert output.prompt_logprobs is not None
        found = [
            entry[token].logprob
            for entry, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)
            if entry
        ]
        assert found == pytest.approx(
            [expected[at, token].item() for at, token in enumerate(ids[1:])], abs=1e-4
        )


def test_stop_token_eos_and_min_tokens(llm: LLM, tiny_text: TinyModel) -> None:
    greedy = tiny_text.greedy(IDS, 20)
    stop = greedy[3]
    first = greedy.index(stop)
    [output] = llm.generate(PROMPT, SamplingParams(temperature=0, stop_token_ids=[stop], max_tokens=20))
    completion = output.outputs[0]
    assert completion.token_ids == greedy[: first + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    later = tokens(llm, temperature=0, stop_token_ids=[stop], min_tokens=first + 3, max_tokens=20)
    assert len(later) >= first + 3
    assert stop not in later[: first + 3]
    always_eos = {130: 100.0}
    [output] = llm.generate(PROMPT, SamplingParams(temperature=0, logit_bias=always_eos, max_tokens=5))
    assert output.outputs[0].token_ids == [130]
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("", "stop")
    assert output.outputs[0].stop_reason is None
    ignored = tokens(llm, temperature=0, logit_bias=always_eos, ignore_eos=True, max_tokens=5)
    assert ignored == [130] * 5


def test_stop_strings_cut_the_text(llm: LLM) -> None:
    [whole] = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=20))
    text = whole.outputs[0].text
    assert len(text) > 10
    stop = text[4:7]
    at = text.index(stop)
    params = SamplingParams(temperature=0, max_tokens=20, stop=["never", stop])
    completion = llm.generate("Hello", params)[0].outputs[0]
    assert completion.text == text[:at]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert len(completion.token_ids) < 20
    params = SamplingParams(temperature=0, max_tokens=20, stop=stop, include_stop_str_in_output=True)
    assert llm.generate("Hello", params)[0].outputs[0].text == text[: at + len(stop)]
    # What looked like the beginning of a stop string is given out in the end.
    params = SamplingParams(temperature=0, max_tokens=20, stop=text[-2:] + "$never")
    assert llm.generate("Hello", params)[0].outputs[0].text == text
    assert "".join(llm.stream("Hello", params)) == text


def test_stream_adds_up_and_can_be_left(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=15)
    [whole] = llm.generate("Hello", params)
    assert "".join(llm.stream("Hello", params)) == whole.outputs[0].text
    for _ in llm.stream("Hello", params):
        break


def test_chat_applies_the_template(llm: LLM) -> None:
    [output] = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(temperature=0, max_tokens=3))
    assert output.prompt_token_ids == [*llm.tokenizer.encode("Hi"), 129]
    assert output.outputs[0].token_ids == tokens(
        llm, {"prompt_token_ids": output.prompt_token_ids}, temperature=0, max_tokens=3
    )


def test_eager_sampling_steps_of_every_kind_are_in_the_report(tiny: TinyModel) -> None:
    with LLM(tiny.directory, **{**SMALL, "cuda_graph_mode": "none"}) as eager:
        for params in ({"temperature": 0}, {"temperature": 1.0}, {"top_k": 3}, {"logprobs": 1}):
            eager.generate(PROMPT, SamplingParams(max_tokens=2, **params))
        # Two steps each, of which one decodes, with plain sampling inside; the last two ask for more in both.
        assert eager.sampling_report().eager_steps == {"disabled": 4 + 2 * 2}
