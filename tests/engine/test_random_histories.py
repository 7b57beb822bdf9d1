"""Calls of `LLM` in any order, with sampling parameters put together at random: every answer is that of a
plain engine that was asked for nothing else, and keeps the rules that its parameters make."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers

from ostinato import LLM, PoolingParams, RequestError, SamplingParams
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.parameters.sampling_params import BeamSearchParams, RequestOutputKind
from ostinato.text.structured import StructuredOutputs

from .asked_alone import Answer, Question, assert_same
from .everything_world import World
from .test_engine_greedy import assert_all_back

EOS, VOCAB, LENGTH = 130, 131, 96
GRAMMARS = (
    StructuredOutputs(regex="[0-9]{1,9}"),
    StructuredOutputs(regex="a{0,40}"),
    StructuredOutputs(choice=["yes", "no", "yesterday"]),
)


def no_token_twice(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A function of a caller."""
    logits[ids[-1:]] = -math.inf
    return logits


def drawn_params(chance: random.Random) -> SamplingParams:
    """Any of what can be asked for together."""
    tokens = chance.choice((1, 3, 8, 16))
    some: list[tuple[float, dict[str, Any]]] = [
        (0.5, {"temperature": chance.choice((0.5, 1.0, 2.0)), "seed": chance.choice((-5, 0, 2**62))}),
        (0.2, {"top_k": chance.choice((1, 5, 131, 500))}),
        (0.2, {"top_p": chance.choice((0.01, 0.5, 0.95))}),
        (0.2, {"min_p": chance.choice((0.05, 1.0))}),
        (0.2, {"presence_penalty": chance.choice((-2.0, 0.7))}),
        (0.2, {"frequency_penalty": chance.choice((-1.5, 2.0))}),
        (0.2, {"repetition_penalty": chance.choice((0.7, 1.3))}),
        (0.3, {"logit_bias": {EOS: 5.0, chance.randrange(VOCAB): chance.choice((-100.0, 6.0))}}),
        (0.3, {"stop_token_ids": chance.sample(range(VOCAB), 12)}),
        (0.2, {"stop": chance.choice((["e", "Q", "12"], ["!", "!!"], ["zz", "+"]))}),
        (0.2, {"include_stop_str_in_output": True}),
        (0.3, {"min_tokens": chance.randint(0, tokens)}),
        (0.3, {"ignore_eos": True}),
        (0.2, {"logprobs": chance.choice((0, 3, -1))}),
        (0.1, {"prompt_logprobs": 1}),
        (0.2, {"n": 3}),
        (0.1, {"allowed_token_ids": chance.sample(range(VOCAB), 9)}),
        (0.2, {"bad_words": [[chance.randrange(VOCAB)], [chance.randrange(40), chance.randrange(VOCAB)]]}),
        (0.1, {"skip_special_tokens": False}),
        (0.1, {"structured_outputs": chance.choice(GRAMMARS)}),
        (0.1, {"logits_processors": [no_token_twice]}),
        (0.3, {"output_kind": chance.choice(list(RequestOutputKind))}),
    ]
    chosen: dict[str, Any] = {"temperature": 0.0, "max_tokens": tokens}
    for likely, fields in some:
        if chance.random() < likely:
            chosen |= fields
    return SamplingParams(**chosen)


def drawn_options(chance: random.Random, draft: str | None) -> dict[str, Any]:
    """Any small engine."""
    running = chance.choice((1, 2, 4, 7))
    drafts: dict[str, Any] = {"num_speculative_tokens": chance.randint(1, 4), "disable_adaptive": True}
    kinds: list[dict[str, Any]] = [
        {},
        {"enable_lora": True},
        {"speculative_config": {**drafts, "method": "ngram", "prompt_lookup_min": 1}},
        {"speculative_config": {**drafts, "method": "draft_model", "model": draft}},
    ]
    return {
        "cuda_graph_mode": chance.choice(("none", "piecewise", "full", "full-and-piecewise")),
        "max_running_requests": running,
        "chunked_prefill_size": max(running, chance.choice((7, 16, 64))),
        "cuda_graph_bs": tuple(sorted({chance.randint(1, running), running})),
        "num_pages": chance.choice((8, 12, 40)),
        "enable_prefix_caching": chance.random() < 0.7,
        "steps_ahead": chance.randint(0, 1),
        **chance.choice(kinds),
    }


@dataclass
class History:
    """What is done to an engine, and what it should say."""

    llm: LLM
    world: World
    reference: Any
    chance: random.Random
    steps: dict[str, tuple[tuple[int, ...], SamplingParams, list[list[int]]]] = field(default_factory=dict)
    """Requests that are served step by step, and the tokens that they were told."""
    queued: list[tuple[tuple[int, ...], SamplingParams]] = field(default_factory=list)
    count: int = 0

    def run(self, length: int) -> None:
        calls = (self.generate, self.leave, self.enqueue, self.wait, self.add, self.step, self.step)
        rarer = (self.abort, self.embed, self.beams, self.sleep, self.flush)
        for _ in range(length):
            self.chance.choice((*calls, *calls, *rarer))()
            self.llm.engine.core.scheduler.check_integrity()
        self.wait()
        while self.steps:
            self.step()
        assert_all_back(self.llm)
        assert not self.llm.engine._served

    # -- what can be called ------------------------------------------------------------------------

    def generate(self) -> None:
        asked = [self.drawn() for _ in range(self.chance.choice((1, 2, 5)))]
        outputs = self.llm.generate([list(prompt) for prompt, _ in asked], [params for _, params in asked])
        for one, output in zip(asked, outputs, strict=True):
            self.judge(*one, output)

    def leave(self) -> None:
        prompt, params = self.drawn()
        params.n, count = 1, self.chance.choice((1, 3, 99))
        pieces = self.llm.stream(list(prompt), params)
        text = "".join(piece for _, piece in zip(range(count), pieces, strict=False))
        pieces.close()  # type: ignore[attr-defined]
        whole = self.expected(prompt, params, 0).text
        assert text == whole if count == 99 else whole.startswith(text)

    def enqueue(self) -> None:
        asked = [self.drawn() for _ in range(2)]
        self.llm.enqueue([list(prompt) for prompt, _ in asked], [params for _, params in asked])
        self.queued += asked

    def wait(self) -> None:
        asked, self.queued = self.queued, []
        for one, output in zip(asked, self.llm.wait_for_completion(), strict=True):
            self.judge(*one, output)

    def add(self) -> None:
        prompt, params = self.drawn()
        self.count += 1
        name = f"step by step {self.count}"
        self.steps[name] = prompt, params, [[] for _ in range(params.n)]
        self.llm.llm_engine.add_request(name, list(prompt), params)

    def step(self) -> None:
        for _ in range(self.chance.randint(1, 6)):
            for output in self.llm.llm_engine.step():
                assert isinstance(output, RequestOutput)
                prompt, params, told = self.steps[output.request_id]
                for tokens, part in zip(told, output.outputs, strict=True):
                    # Everything so far, or what is new.
                    kept = tokens if params.output_kind is RequestOutputKind.DELTA else []
                    assert [*kept, *part.token_ids][: len(tokens)] == tokens
                    tokens[:] = [*kept, *part.token_ids]
                if output.finished:
                    del self.steps[output.request_id]
                    for number, tokens in enumerate(told):
                        assert tokens == self.expected(prompt, params, number).token_ids

    def abort(self) -> None:
        if self.steps:
            name = self.chance.choice(list(self.steps))
            self.llm.llm_engine.abort_request(name)
            del self.steps[name]

    def embed(self) -> None:
        prompt = self.chance.choice(self.world.prompts)
        params = PoolingParams(normalize=False)
        [found] = self.llm.embed({"prompt_token_ids": list(prompt)}, pooling_params=params, pooling="mean")
        states = self.world.alone.says(Question(prompt, None, None, 0)).states
        assert states is not None
        torch.testing.assert_close(torch.tensor(found.embedding), states[0], atol=2e-3, rtol=2e-3)

    def beams(self) -> None:
        prompt, params = list(self.chance.choice(self.world.prompts)), BeamSearchParams(2, 4)
        [found], [expected] = (llm.beam_search([prompt], params) for llm in (self.llm, self.world.alone.llm))
        assert [one.tokens for one in found.sequences] == [one.tokens for one in expected.sequences]

    def sleep(self) -> None:
        self.llm.sleep(1, "keep")
        self.llm.wake_up(["weights"])
        self.llm.wake_up()

    def flush(self) -> None:
        assert self.llm.reset_prefix_cache(reset_running_requests=self.chance.random() < 0.5)

    # -- what should come of it --------------------------------------------------------------------

    def drawn(self) -> tuple[tuple[int, ...], SamplingParams]:
        """A prompt and parameters that leave a token at every place."""
        while True:
            prompt, params = self.chance.choice(self.world.prompts), drawn_params(self.chance)
            try:
                for number in range(params.n):
                    self.expected(prompt, params, number)
            except (RequestError, AssertionError) as error:
                assert "leave no token" in str(error)  # noqa: PT017
                continue
            return prompt, params

    def expected(self, prompt: tuple[int, ...], params: SamplingParams, number: int) -> Answer:
        return self.world.alone.says(Question(prompt, params.verified().seeded(number), None, 0))

    def judge(self, prompt: tuple[int, ...], params: SamplingParams, output: RequestOutput) -> None:
        assert output.error is None
        for number, completion in enumerate(output.outputs):
            found = Answer.of(completion, output.prompt_logprobs)
            assert_same(found, self.expected(prompt, params, number))
            self.assert_rules(prompt, params, found)

    def assert_rules(self, prompt: tuple[int, ...], params: SamplingParams, found: Answer) -> None:
        """From the logits of transformers: nothing forbidden, the likeliest token where it is asked for, and
        an end where there has to be one."""
        all_logits = self.reference(torch.tensor([[*prompt, *found.token_ids]])).logits[0]
        has_grammar = params.structured_outputs is not None
        ends = {*(params.stop_token_ids or ()), *([] if params.ignore_eos and not has_grammar else [EOS])}
        words: list[Any] = list(params.bad_words or ())
        for at, token in enumerate(found.token_ids):
            logits, before = all_logits[len(prompt) + at - 1].clone(), found.token_ids[:at]
            for function in params.logits_processors or ():
                logits = function(before, logits)
            for biased, value in (params.logit_bias or {}).items():
                logits[biased] += value
            seen = [*{*prompt, *before}]
            penalty = params.repetition_penalty
            logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
            for other, count in Counter(before).items():
                logits[other] -= params.presence_penalty + count * params.frequency_penalty
            forbidden = {word[-1] for word in words if [*before, word[-1]][-len(word) :] == word}
            forbidden |= ends if at < params.min_tokens else set()
            if params.allowed_token_ids is not None:
                forbidden |= {*range(VOCAB)} - {*params.allowed_token_ids}
            assert token not in forbidden
            logits[[*forbidden]] = -math.inf
            if params.is_greedy and not has_grammar:
                assert logits[token] > logits.max() - 1e-3
            assert token not in ends or at < params.min_tokens or at + 1 == len(found.token_ids)
        if found.finish_reason == "length":
            assert len(found.token_ids) == min(params.max_tokens or LENGTH, LENGTH - len(prompt))
        assert len(found.token_ids) >= params.min_tokens


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.of_texts(tmp_path_factory.mktemp("histories"))


def check(world: World, seed: int) -> None:
    chance = random.Random(seed)
    reference = transformers.LlamaForCausalLM.from_pretrained(world.directory).requires_grad_(False)
    options = drawn_options(chance, world.draft)
    always = {"enable_sleep_mode": True, "max_logprobs": -1, "dtype": "float32", "enable_cudagraph_gc": True}
    with LLM(world.directory, max_model_len=LENGTH, **always, **options) as llm:
        History(llm, world, reference, chance).run(25)


@pytest.mark.parametrize("seed", range(1))
def test_a_history(world: World, seed: int) -> None:
    check(world, seed)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(1, 60))
def test_many_histories(world: World, seed: int) -> None:
    check(world, seed)
