"""Log probabilities of everything, prompts that are cut, salts of the prefix cache, what streams carry."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ostinato.engine.async_llm import AsyncLLM
from ostinato.engine.delivery.output_stream import OutputStream
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import CompletionOutput, RequestOutput
from ostinato.engine.parameters.parameter_checks import token_sequences
from ostinato.engine.parameters.sampling_params import (
    BeamSearchParams,
    RequestError,
    RequestOutputKind,
    SamplingParams,
)

from .conftest import TINY, TinyModel, prompts_of

VOCAB = TINY["vocab_size"]
SMALL: dict[str, Any] = {"max_model_len": 96, "max_running_requests": 4, "num_pages": 60, "max_logprobs": -1}
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_text: TinyModel) -> Iterator[LLM]:
    with LLM(tiny_text.directory, steps_ahead=1, cuda_graph_mode="full", **SMALL) as llm:
        yield llm


def changed(**given: Any) -> SamplingParams:
    params = GREEDY.clone()
    for name, value in given.items():
        setattr(params, name, value)
    return params


# -- log probabilities -----------------------------------------------------------------------------


def test_log_probabilities_of_the_whole_vocabulary(llm: LLM, tiny_text: TinyModel) -> None:
    """Beside a request that has few of them, and one that has none."""
    prompts = prompts_of((7, 9, 4))
    wanted = [changed(logprobs=-1, prompt_logprobs=-1), changed(logprobs=3), GREEDY]
    whole, few, none = llm.generate(prompts, wanted)
    assert whole.outputs[0].logprobs is not None
    assert whole.prompt_logprobs is not None
    ids = [*prompts[0]["prompt_token_ids"], *whole.outputs[0].token_ids]
    expected = tiny_text.reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    entries = [*whole.prompt_logprobs[1:], *whole.outputs[0].logprobs]
    assert len(entries) == len(ids) - 1
    for entry, token, line in zip(entries, ids[1:], expected, strict=False):
        assert entry is not None
        assert next(iter(entry)) == token, "the one that came is the first"
        assert sorted(entry) == list(range(VOCAB))
        found = torch.tensor([entry[other].logprob for other in range(VOCAB)])
        assert torch.allclose(found, line, atol=1e-4)
        assert sorted(each.rank or 0 for each in entry.values())[-1] == VOCAB
        assert entry[int(line.argmax())].rank == 1
    assert few.outputs[0].logprobs is not None
    assert [len(entry) for entry in few.outputs[0].logprobs] == [3] * 5
    assert none.outputs[0].logprobs is None
    assert whole.outputs[0].logprobs[0][ids[7]].decoded_token == llm.tokenizer.decode([ids[7]])


def test_log_probabilities_of_many_and_of_chosen_tokens(llm: LLM) -> None:
    [prompt] = prompts_of((6,))
    many, chosen = llm.generate([prompt] * 2, [changed(logprobs=50), changed(logprob_token_ids=[3, 99])])
    assert many.outputs[0].logprobs is not None
    assert chosen.outputs[0].logprobs is not None
    for entry, named, token in zip(
        many.outputs[0].logprobs, chosen.outputs[0].logprobs, many.outputs[0].token_ids, strict=True
    ):
        assert len(entry) == 50
        assert sorted(each.rank or 0 for each in entry.values()) == list(range(1, 51))
        assert set(named) == {token, 3, 99}
        assert named[token].rank == 1


# -- prompts ---------------------------------------------------------------------------------------


def test_prompts_are_cut_to_their_end(llm: LLM) -> None:
    [prompt] = prompts_of((60,))
    ids = prompt["prompt_token_ids"]
    [cut] = llm.generate(prompt, changed(truncate_prompt_tokens=4))
    assert cut.prompt_token_ids == ids[-4:]
    [same] = llm.generate({"prompt_token_ids": ids[-4:]}, GREEDY)
    assert cut.outputs[0].token_ids == same.outputs[0].token_ids
    [fits] = llm.generate({"prompt_token_ids": ids * 2}, changed(truncate_prompt_tokens=-1))
    assert len(fits.prompt_token_ids) == 96 - 5
    assert len(fits.outputs[0].token_ids) == 5


def test_salts_divide_the_prefix_cache(llm: LLM) -> None:
    [prompt] = prompts_of((40,), seed=77)
    found = {}
    for salt in ("one", None, "two", "one", None):
        given = prompt if salt is None else {**prompt, "cache_salt": salt}
        [output] = llm.generate(given, GREEDY)
        found.setdefault(salt, []).append(output.num_cached_tokens)
    assert found == {"one": [0, 32], None: [0, 32], "two": [0]}
    [output] = llm.generate(prompt, changed(skip_reading_prefix_cache=True))
    assert output.num_cached_tokens == 0
    llm.engine.core.scheduler.check_integrity()
    for salt in ("", 5):
        with pytest.raises(RequestError, match="cache_salt must be a non-empty string"):
            llm.generate({**prompt, "cache_salt": salt}, GREEDY)


@pytest.mark.parametrize("call", ["embed", "encode", "beam_search"])
def test_salts_divide_the_prefix_cache_in_calls_that_complete_nothing(llm: LLM, call: str) -> None:
    [prompt] = prompts_of((40,), seed=78)
    asked = {
        "embed": llm.embed,
        "encode": lambda prompts: llm.encode(prompts, pooling_task="embed"),
        "beam_search": lambda prompts: llm.beam_search(prompts, BeamSearchParams(2, 3)),
    }[call]
    llm.reset_prefix_cache()
    asked([{**prompt, "cache_salt": "one"}])
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0
    assert llm.generate({**prompt, "cache_salt": "one"}, GREEDY)[0].num_cached_tokens == 32
    with pytest.raises(RequestError, match="cache_salt must be a non-empty string"):
        asked({**prompt, "cache_salt": ""})


def test_salts_divide_blocks_of_pages_too(llm: LLM) -> None:
    """Sixteen pages in a row are found in one look."""
    index = type(llm.engine.core.scheduler.pages)(40, 2)
    tokens = list(range(33))
    for salt in (b"", b"x"):
        pages, (first, *others) = index.allocate(16), index.contents(tokens)
        assert index.commit_row(pages, 0, [salt + first, *others]) == pages
        assert index.match(tokens, salt).tolist() == pages
    assert not len(index.match(tokens, b"y"))
    assert set(index.match(tokens)).isdisjoint(index.match(tokens, b"x"))


# -- words -----------------------------------------------------------------------------------------


def test_words_as_tokens() -> None:
    """With a blank before them and without, each once; what is blank itself stays."""
    known = {"foo": [1], " foo": [2], "ba": [3, 4], " ba": [5], "\n": [9]}
    words = token_sequences(["foo", " ba", "\n", [7, 8], "foo"], known.__getitem__)
    assert words == [[1], [2], [3, 4], [5], [9], [7, 8]]
    with pytest.raises(RequestError, match="bad_words: 'x' has no tokens"):
        token_sequences(["x"], lambda text: [])


# -- streams ---------------------------------------------------------------------------------------


def told(stream: OutputStream, output: RequestOutput, ends: tuple[int, ...]) -> list[tuple[str, list[int]]]:
    """What a stream tells of an output that grows to these lengths and ends with the last."""
    news = []
    for end in ends:
        completion = output.outputs[0]
        completion.token_ids[:] = range(end)
        completion.text = "abcdefghij"[:end]  # type: ignore[assignment]
        completion.finish_reason = "length" if end == ends[-1] else None
        found = stream.news(output)
        if found is not None:
            news.append((str(found.outputs[0].text), list(found.outputs[0].token_ids)))
    return news


@pytest.mark.parametrize(
    ("kind", "interval", "expected"),
    [
        ("CUMULATIVE", None, ["a", "ab", "abc", "abcd"]),
        ("CUMULATIVE", 2, ["a", "abc", "abcd"]),
        ("DELTA", None, ["a", "b", "c", "d"]),
        ("DELTA", 2, ["a", "bc", "d"]),
        ("FINAL_ONLY", None, ["abcd"]),
    ],
)
def test_what_a_stream_tells(kind: str, interval: int | None, expected: list[str]) -> None:
    params = SamplingParams(output_kind=RequestOutputKind[kind], stream_interval=interval)
    news = told(OutputStream(params), RequestOutput("x", None, [1], [CompletionOutput(0)]), (1, 2, 3, 4))
    assert [text for text, _ in news] == expected
    assert [len(ids) for _, ids in news] == [len(text) for text in expected]


def test_streams_of_an_engine(tiny_text: TinyModel) -> None:
    async def outputs(llm: AsyncLLM, **given: Any) -> list[RequestOutput]:
        params = changed(**{"temperature": 1.0, "seed": 1, "max_tokens": 8, "logprobs": 0, **given})
        return [output async for output in llm.generate("hello", params)]

    async def all_kinds(llm: AsyncLLM) -> list[list[RequestOutput]]:
        kinds = (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY)
        several = outputs(llm, output_kind=kinds[1], n=2)
        return list(await asyncio.gather(*(outputs(llm, output_kind=kind) for kind in kinds), several))

    llm = AsyncLLM(tiny_text.directory, **{**SMALL, "cuda_graph_mode": "none"})
    try:
        cumulative, delta, final, several = asyncio.run(all_kinds(llm))
    finally:
        llm.close()
    assert llm._inboxes.streams == {}
    whole = cumulative[-1].outputs[0]
    assert [len(output.outputs[0].token_ids) for output in cumulative] == list(range(1, 9))
    assert [output.finished for output in delta] == [False] * 7 + [True]
    assert [token for output in delta for token in output.outputs[0].token_ids] == whole.token_ids
    assert "".join(str(output.outputs[0].text) for output in delta) == whole.text
    assert all(len(output.outputs[0].logprobs or ()) == 1 for output in delta)
    assert [output.outputs[0] for output in final] == [whole]
    first, second = ([t for output in several for t in output.outputs[at].token_ids] for at in range(2))
    assert first == whole.token_ids
    assert len(second) == 8
