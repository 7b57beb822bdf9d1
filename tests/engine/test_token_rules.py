"""allowed_token_ids, bad_words and logits_processors: what may come, beside grammars and free requests."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import RequestError, SamplingParams, StructuredOutputsParams
from ostinato.engine.scheduling.request import Request, RequestRows
from ostinato.engine.scheduling.token_rules import rules_of

from .conftest import TINY, TinyModel, prompts_of

EOS, VOCAB, LENGTH = 130, TINY["vocab_size"], 12
SMALL: dict[str, Any] = {"max_model_len": 96, "max_running_requests": 6, "num_pages": 60}
FREE = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(scope="module", params=[0, 1], ids=["in step", "a step ahead"])
def llm(tiny_text: TinyModel, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(tiny_text.directory, steps_ahead=request.param, cuda_graph_mode="full", **SMALL) as llm:
        yield llm


def tokens_of(llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[list[int]]:
    outputs = llm.generate(prompts, params)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs[0].token_ids for output in outputs]


def ids_of(text: str) -> list[int]:
    """In the tokenizer of the tiny model."""
    return [ord(character) - ord("!") for character in text]


def next_token(logits: torch.Tensor, params: SamplingParams, made: list[int]) -> int:
    """The rules as they are told."""
    if params.allowed_token_ids is not None:
        others = [token for token in range(VOCAB) if token not in params.allowed_token_ids]
        logits[others] = -torch.inf
    for word in params.bad_words or ():
        *before, last = word
        if len(before) <= len(made) and made[len(made) - len(before) :] == before:
            logits[int(last)] = -torch.inf
    best, second = logits.topk(2).values.tolist()
    assert best - second > 1e-3, "a tie: the reference proves nothing, choose another seed"
    return int(logits.argmax())


def greedy(tiny: TinyModel, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    """Over forward passes of another implementation; prompts of one length."""
    made: list[list[int]] = [[] for _ in prompts]
    for _ in range(LENGTH):
        so_far = [prompt + output for prompt, output in zip(prompts, made, strict=True)]
        logits = tiny.reference(torch.tensor(so_far)).logits[:, -1]
        for output, line, one in zip(made, logits, params, strict=True):
            output.append(next_token(line, one, output))
    return made


@pytest.mark.parametrize("seed", range(1, 5))
def test_tokens_are_those_of_a_plain_computation(llm: LLM, tiny_text: TinyModel, seed: int) -> None:
    """Random lists, made of what would come without them, beside requests that have none."""
    draw = random.Random(seed)
    prompts = prompts_of([draw.randrange(1, 30)] * 9, seed)
    free = tokens_of(llm, prompts, [FREE] * 9)
    params = []
    for made in free:
        words = []
        for _ in range(draw.choice([0, 1, 6])):
            begin, size = draw.randrange(LENGTH - 4), draw.choice([1, 2, 2, 3, 4])
            words.append(made[begin : begin + size])
        allowed = draw.sample(range(VOCAB), draw.choice([5, 60])) if draw.random() < 0.4 else None
        one = FREE.clone()
        one.bad_words, one.allowed_token_ids = words or None, allowed
        params.append(one)
    assert any(one.bad_words for one in params)
    expected = greedy(tiny_text, [prompt["prompt_token_ids"] for prompt in prompts], params)
    assert tokens_of(llm, prompts, params) == expected
    assert expected != free
    assert llm.graph_report().eager_steps == {}
    report = llm.sampling_report()
    assert report is not None
    assert report.eager_steps == {}


def test_words_are_forbidden_as_they_are_written(llm: LLM) -> None:
    """A token in common with a word is no word."""
    base = SamplingParams(temperature=1.5, max_tokens=30, ignore_eos=True)
    base.logit_bias = dict.fromkeys(ids_of("ab"), 60.0)
    wanted = []
    for seed in range(4):
        one = base.clone()
        one.seed, one.bad_words = seed, ["aba", " bb"]
        wanted.append(one)
    text = "|".join(llm.tokenizer.decode(ids) for ids in tokens_of(llm, ["x"] * 4, wanted))
    assert "aba" not in text
    assert "bb" not in text
    assert "ab" in text
    one.bad_words = None
    assert "bb" in llm.generate("x", one)[0].outputs[0].text


def test_lists_and_grammars_together(llm: LLM) -> None:
    """A token has to be allowed by all of them."""
    digits = StructuredOutputsParams(regex="[0-9]{8}")
    params = SamplingParams(max_tokens=20, seed=3, structured_outputs=digits, bad_words=["00", "12"])
    params.allowed_token_ids = [*ids_of("012ab"), EOS]
    free = FREE.clone()
    outputs = llm.generate(["hello", "hello"], [params, free])
    text = outputs[0].outputs[0].text
    assert re.fullmatch("[012]{8}", text)
    assert "00" not in text
    assert "12" not in text
    assert outputs[1].outputs[0].token_ids == tokens_of(llm, ["hello"], [free])[0]


def test_a_row_is_free_again_behind_lists(tiny_text: TinyModel) -> None:
    with LLM(tiny_text.directory, **{**SMALL, "max_running_requests": 1}) as llm:
        told = FREE.clone()
        told.logprobs = 1
        [before] = tokens_of(llm, ["hello"], [told])
        bound = FREE.clone()
        bound.allowed_token_ids = [7, 8]
        assert set(tokens_of(llm, ["hello"], [bound])[0]) <= {7, 8}
        assert tokens_of(llm, ["hello"], [told]) == [before]


def test_preempted_requests_keep_to_their_lists(tiny_text: TinyModel) -> None:
    wanted = []
    for seed in range(4):
        params = SamplingParams(max_tokens=40, seed=seed, ignore_eos=True, bad_words=["aa", "bb", "ab"])
        params.allowed_token_ids = ids_of("abc")
        wanted.append(params)
    with LLM(tiny_text.directory, steps_ahead=1, **{**SMALL, "num_pages": 9}) as llm:
        together = tokens_of(llm, ["hello"] * 4, wanted)
        assert llm.engine.core.scheduler.num_preemptions > 0
        assert together == [tokens_of(llm, ["hello"], [one])[0] for one in wanted]
        for ids in together:
            assert not re.search("aa|bb|ab", llm.tokenizer.decode(ids))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"allowed_token_ids": [3, 131]}, "allowed_token_ids: token 131 is outside the vocabulary"),
        ({"bad_words": [[200]]}, "bad_words: token 200 is outside the vocabulary"),
        ({"allowed_token_ids": ids_of("a"), "bad_words": ["a"]}, "allowed_token_ids: .* leave no token"),
        ({"allowed_token_ids": [EOS], "min_tokens": 2}, "allowed_token_ids: .* leave no token"),
        ({"logprob_token_ids": [131]}, "logprob_token_ids: token 131"),
        (
            {"logprobs": -1},
            r"logprobs is -1 \(all\), and at most 20 are allowed: raise the engine.s max_logprobs",
        ),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
    ],
)
def test_what_cannot_be_is_refused_before_it_runs(llm: LLM, given: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        llm.generate("hello", SamplingParams(**given))
    assert not llm.engine.has_work


def test_a_changed_value_that_is_wrong_is_refused_by_name(llm: LLM) -> None:
    params = FREE.clone()
    params.min_p = 7
    with pytest.raises(RequestError, match="min_p must be from 0 to 1, not 7"):
        llm.generate("hello", params)
    with pytest.raises(RequestError, match="sampling_params must be SamplingParams, not dict"):
        llm.engine.add("hello", {"n": 1})  # type: ignore[arg-type]
    running = FREE.clone()
    output = llm.engine.add("hello", running)
    running.max_tokens = 1
    while llm.engine.has_work:
        llm.engine.step()
    assert len(output.outputs[0].token_ids) == LENGTH, "a request has a copy of its own"


@pytest.mark.parametrize(
    "given",
    [
        {"allowed_token_ids": ids_of("ab"), "bad_words": ["aa", "ab", "ba", "bb"]},
        {
            "structured_outputs": StructuredOutputsParams(regex="ab*"),
            "bad_words": ["ab", [*ids_of("a"), EOS]],
        },
        {"structured_outputs": StructuredOutputsParams(regex="[0-9]"), "min_tokens": 3},
        {"structured_outputs": StructuredOutputsParams(regex="[0-9]"), "allowed_token_ids": ids_of("a")},
        {"allowed_token_ids": ids_of("a"), "bad_words": ["aa"], "top_p": 0.5, "logprobs": 1},
    ],
)
def test_lists_that_come_to_exclude_each_other_end_in_an_error(llm: LLM, given: dict[str, Any]) -> None:
    """For whoever gave them, without a token that is against them; also as the last one that is wanted."""
    for max_tokens in (9, given.get("min_tokens", 2)):
        params = SamplingParams(**{"max_tokens": max_tokens, "seed": 1, **given})
        outputs = llm.generate(["hello", "hello"], [params, FREE])
        assert outputs[0].error is not None
        assert "leave no token that is allowed" in outputs[0].error
        assert outputs[0].outputs[0].finish_reason == "error"
        assert len(outputs[0].outputs[0].token_ids) <= 1
        assert outputs[1].outputs[0].token_ids == tokens_of(llm, ["hello"], [FREE])[0]
    llm.engine.core.scheduler.check_integrity()


# -- functions of callers --------------------------------------------------------------------------


def only(*tokens: int) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    def processor(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        kept = torch.full_like(logits, -torch.inf)
        kept[list(tokens)] = logits[list(tokens)]
        return kept

    return processor


def with_processors(*functions: Any, **given: Any) -> SamplingParams:
    return SamplingParams(
        **{
            "temperature": 0,
            "max_tokens": LENGTH,
            "ignore_eos": True,
            "logits_processors": functions,
            **given,
        }
    )


def test_functions_see_the_tokens_and_change_the_logits(llm: LLM) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def in_turns(prompt: list[int], ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((prompt, ids))
        logits[torch.arange(VOCAB) % 2 != len(ids) % 2] = -torch.inf
        return logits

    first, second = tokens_of(llm, ["hello", "hello"], [with_processors(in_turns), FREE])
    assert [token % 2 for token in first] == [at % 2 for at in range(LENGTH)]
    assert [ids for _, ids in seen] == [first[:at] for at in range(LENGTH)]
    assert {tuple(prompt) for prompt, _ in seen} == {tuple(llm.tokenizer.encode("hello"))}
    assert second == tokens_of(llm, ["hello"], [FREE])[0]


def test_functions_beside_everything_else(llm: LLM) -> None:
    params = with_processors(
        only(*ids_of("abc")), temperature=1.0, seed=1, bad_words=["aa", "bb"], logprobs=2
    )
    params.allowed_token_ids = ids_of("ab")
    [output] = llm.generate("hello", params)
    completion = output.outputs[0]
    assert set(completion.text) == {"a", "b"}
    assert "aa" not in completion.text
    assert "bb" not in completion.text
    plain = SamplingParams(max_tokens=1, logprobs=2)
    [other] = llm.generate("hello", plain)
    assert completion.logprobs is not None
    assert other.outputs[0].logprobs is not None
    ours = {token: entry.logprob for token, entry in completion.logprobs[0].items()}
    theirs = {token: entry.logprob for token, entry in other.outputs[0].logprobs[0].items()}
    likeliest = sorted(theirs, key=theirs.__getitem__)[-2:]
    assert {token: ours[token] for token in likeliest} == pytest.approx(
        {token: theirs[token] for token in likeliest}, abs=1e-5
    ), "under the model itself, before anything changes it"


def broken(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise KeyError("oops")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (broken, "logits_processors: broken raised KeyError: 'oops'"),
        (lambda ids, logits: None, "must return logits of shape"),
        (lambda ids, logits: logits[:5], "must return logits of shape"),
        (lambda ids, logits: logits * torch.nan, "nan among the logits"),
        (lambda ids, logits: logits - torch.inf, "leave no token"),
        (only(*ids_of("c")), "leave no token"),
    ],
)
def test_functions_that_fail_end_their_own_request(llm: LLM, function: Any, says: str) -> None:
    params = with_processors(function, allowed_token_ids=ids_of("ab"))
    outputs = llm.generate(["hello", "hello"], [params, FREE])
    assert outputs[0].error is not None
    assert says in outputs[0].error
    assert outputs[1].outputs[0].token_ids == tokens_of(llm, ["hello"], [FREE])[0]


def test_books_made_anew_still_know_who_waits() -> None:
    """After a failure the steps of a request with bad words still wait for its tokens."""
    rows = RequestRows(max_running=2, max_len=16, page_size=16)
    params = SamplingParams(bad_words=[[1, 2]], max_tokens=4)
    request = Request("a", np.array([3]), params)
    request.rules = rules_of(params, (), VOCAB, has_grammar=False)
    rows.move_in(request, 16)
    rows.restore([request])
    assert rows.num_waiting == 1
    rows.move_out(request)
    assert rows.num_waiting == 0
