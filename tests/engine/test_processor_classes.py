"""`LLM(logits_processors=[...])`: classes that change the logits of batches or of single requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ostinato.config import VllmConfig
from ostinato.v1.sample.logits_processor import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor
from ostinato.v1.sample.logits_processor.builtin import process_dict_updates
from torch import Tensor

from ostinato import LLM, SamplingParams
from ostinato.engine.parameters.sampling_params import RequestError
from ostinato.engine.sampling.logits_processors import MoveDirectionality, ProcessorBatch
from ostinato.engine.scheduling.request import Request
from ostinato.graphs import ConfigError

from .conftest import TINY, TinyModel, prompts_of

VOCAB = TINY["vocab_size"]
SMALL: dict[str, Any] = {
    "max_model_len": 96,
    "max_running_requests": 5,
    "num_pages": 60,
    "cuda_graph_bs": (1, 5),
}


class Forced(LogitsProcessor):
    """The n-th token of a request that says `from` is from + n, by the list of tokens that it was given."""

    is_told_to_fail = False

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        first = (sampling_params.extra_args or {}).get("from")
        if first is not None and not isinstance(first, int):
            raise ValueError(f"from must be a number, not {first!r}")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        assert vllm_config.scheduler_config.max_num_seqs == SMALL["max_running_requests"]
        assert device.type == "cpu"
        self.wanted: dict[int, tuple[int, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.wanted, batch_update, self.state_of)

    def state_of(
        self, params: SamplingParams, prompt: list[int] | None, output: list[int]
    ) -> tuple[int, list[int]] | None:
        assert prompt
        return None if (first := (params.extra_args or {}).get("from")) is None else (first, output)

    def apply(self, logits: Tensor) -> Tensor:
        if Forced.is_told_to_fail:
            raise ValueError("told to")
        for index, (first, output) in self.wanted.items():
            token = first + len(output)
            assert output == list(range(first, token)), "all tokens so far"
            kept = logits[index, token].item()
            logits[index] = -torch.inf
            logits[index, token] = kept
        return logits


class Echoing(AdapterLogitsProcessor):
    """Only the first token of the prompt may come, where somebody asks."""

    num_calls = 0

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., Tensor] | None:
        return self.echo if (params.extra_args or {}).get("echo") else None

    @staticmethod
    def echo(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
        Echoing.num_calls += 1
        changed = torch.full_like(logits, -torch.inf)
        changed[prompt[0]] = 0.0
        return changed


class Likely(LogitsProcessor):
    """Only tokens at least half as likely as the likeliest, at the temperature of the request."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass

    def apply(self, logits: Tensor) -> Tensor:
        likely = logits.softmax(-1)
        return logits.masked_fill(likely < 0.5 * likely.amax(-1, keepdim=True), -torch.inf)


@pytest.fixture(scope="module", params=[0, 1], ids=["in step", "a step ahead"])
def llm(shallow: TinyModel, request: pytest.FixtureRequest) -> Iterator[LLM]:
    classes = [Forced, f"{__name__}:Echoing"]
    with LLM(shallow.directory, logits_processors=classes, steps_ahead=request.param, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(shallow: TinyModel) -> Iterator[LLM]:
    with LLM(shallow.directory, **SMALL) as llm:
        yield llm


def params(length: int, **asked: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, extra_args=asked or None)


def test_each_request_gets_what_it_asks_for(llm: LLM, shallow: TinyModel) -> None:
    """More than run at a time, of several lengths, so that places in the batch change hands."""
    prompts = prompts_of([3, 9, 4, 5, 30, 6, 2, 7, 8, 3, 4])
    kinds = ({"from": 20}, {}, {"echo": True}, {"from": 60}, {})
    asked = [kinds[at % len(kinds)] for at in range(len(prompts))]
    lengths = [random.Random(at).randint(1, 9) for at in range(len(prompts))]
    outputs = llm.generate(prompts, [params(n, **one) for n, one in zip(lengths, asked, strict=True)])
    for output, prompt, length, one in zip(outputs, prompts, lengths, asked, strict=True):
        ids = prompt["prompt_token_ids"]
        wanted = shallow.greedy(tuple(ids), length)
        if "from" in one:
            wanted = list(range(one["from"], one["from"] + length))
        if "echo" in one:
            wanted = [ids[0]] * length
        assert output.error is None
        assert output.outputs[0].token_ids == wanted


def test_logprobs_are_those_of_the_model(llm: LLM, plain: LLM) -> None:
    [prompt] = prompts_of([4])
    asked = SamplingParams(temperature=0, max_tokens=1, logprobs=VOCAB - 111, extra_args={"from": 20})
    [changed] = llm.generate([prompt], asked)
    [free] = plain.generate([prompt], SamplingParams(temperature=0, max_tokens=1, logprobs=VOCAB - 111))
    assert changed.outputs[0].logprobs is not None
    assert free.outputs[0].logprobs is not None
    found, wanted = changed.outputs[0].logprobs[0], free.outputs[0].logprobs[0]
    assert wanted.items() <= found.items()


def test_parameters_that_a_class_refuses(llm: LLM) -> None:
    with pytest.raises(RequestError, match="Forced: from must be a number, not 'a'"):
        llm.generate(prompts_of([3])[0], params(3, **{"from": "a"}))
    assert llm.generate(prompts_of([3])[0], params(3, **{"from": 2}))[0].outputs[0].token_ids == [2, 3, 4]


def test_a_class_that_raises_ends_the_requests_of_the_step(
    llm: LLM, shallow: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of([3, 4])
    with monkeypatch.context() as patched:
        patched.setattr(Forced, "is_told_to_fail", True)
        outputs = llm.generate(prompts, params(3))
    assert [output.error for output in outputs] == ["Forced raised ValueError: told to"] * 2
    for output, prompt in zip(llm.generate(prompts, params(3)), prompts, strict=True):
        assert output.outputs[0].token_ids == shallow.greedy(tuple(prompt["prompt_token_ids"]), 3)


def test_adapters_cost_only_those_who_ask(shallow: TinyModel) -> None:
    with LLM(shallow.directory, logits_processors=[Echoing], **SMALL) as llm:
        before = Echoing.num_calls
        first, second = llm.generate(prompts_of([3, 4]), [params(5), params(5, echo=True)])
        assert Echoing.num_calls == before + 5
        requests = [Request(str(at), output.prompt_token_ids) for at, output in enumerate((first, second))]
        sampler = llm.engine.core.sampler
        assert sampler is not None
        sampler.take(requests[0], params(5))
        sampler.take(requests[1], params(5, echo=True))
        assert [request.waits_for_tokens for request in requests] == [False, True]


def test_what_keeps_the_likeliest_sees_the_temperature(shallow: TinyModel, plain: LLM) -> None:
    """The same as min_p, which comes behind the temperature."""
    prompts = prompts_of([3, 4, 5])
    with LLM(shallow.directory, logits_processors=[Likely], **SMALL) as llm:
        for heat in (0.5, 2.0, 0.0):
            asked = {"temperature": heat, "seed": 5, "max_tokens": 8, "ignore_eos": True}
            found = llm.generate(prompts, SamplingParams(**asked))
            wanted = plain.generate(prompts, SamplingParams(**asked, min_p=0.5))
            assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in wanted]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["no_such_module:X"], "no_such_module"),
        (["random:NoSuch"], "NoSuch"),
        (["random"], "module:Class"),
        ([random.Random], "not a class that inherits from LogitsProcessor"),
        ([lambda ids, logits: logits], "functions go to SamplingParams"),
    ],
)
def test_what_is_no_such_class_is_refused(shallow: TinyModel, given: list[Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM(shallow.directory, logits_processors=given, **SMALL)


class Watching(LogitsProcessor):
    """Keeps the batch by the updates alone, by hand, in their order."""

    def __init__(self) -> None:
        self.known: dict[int, list[int]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            del self.known[index]
        for index, _, prompt, _ in batch_update.added:
            assert prompt is not None
            self.known[index] = prompt
        for first, second, how in batch_update.moved:
            assert how is MoveDirectionality.UNIDIRECTIONAL
            self.known[second] = self.known.pop(first)
        assert sorted(self.known) == list(range(batch_update.batch_size))

    def apply(self, logits: Tensor) -> Tensor:
        for index, prompt in self.known.items():
            assert logits[index].tolist() == [float(prompt[0])] * 2
        return logits + 1


def test_a_batch_can_be_followed_by_its_updates() -> None:
    chance = random.Random(3)
    requests = [Request(str(at), [at], SamplingParams()) for at in range(12)]
    batch = ProcessorBatch([Watching()])
    for _ in range(300):
        lines = {each: torch.full((2,), float(each.prompt_ids[0])) for each in requests}
        here = {each: lines[each] for each in chance.sample(requests, chance.randint(1, 12))}
        assert batch.apply(here) is None
        assert all(line.tolist() == [each.prompt_ids[0] + 1] * 2 for each, line in here.items())
