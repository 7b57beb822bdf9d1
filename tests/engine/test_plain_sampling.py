"""Plain requests get their tokens from the decode step itself; others from a graph behind it; all are right.

Device and host count the lines of tokens each for themselves; every test ends with both at the same count.
"""

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams, StructuredOutputs
from ostinato.engine.sampling.kinds import Kind
from ostinato.engine.scheduling.request import Request
from ostinato.engine.stepping import flight
from ostinato.engine.stepping.token_return import Amendment, Launched, Sampled, TokenReturn
from ostinato.graphs import InputBuffers
from ostinato.kernels.sampling.plain import return_tokens
from ostinato.kernels.sampling.token_lines import LogprobLines

from .conftest import STEPS_AHEAD, TinyModel, prompts_of
from .expected_steps import sampling_of
from .test_engine_greedy import MODES, SMALL, assert_all_back

PLAIN: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 3}, {"seed": 4, "temperature": 0.6}]
FILTERED: list[dict[str, Any]] = [
    {"seed": 5, "top_k": 7},
    {"seed": 6, "top_p": 0.8},
    {"seed": 7, "min_p": 0.1},
]
ADJUSTED: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"seed": 8, "frequency_penalty": 0.7},
    {"temperature": 0, "logit_bias": {5: 4.0}},
    {"seed": 9, "min_tokens": 3},
]
PROMPTS = prompts_of((5, 4, 3, 4), seed=2)
"""One step of 16 tokens."""


@contextmanager
def engine(model: TinyModel, **options: Any) -> Iterator[LLM]:
    """Afterwards everything is back, and the counts agree."""
    with LLM(model.directory, **{**SMALL, **options}) as llm:
        assert counts(llm) == (0, 0), "warm-ups and recordings write no line that counts"
        yield llm
        assert_all_back(llm)
        on_device, on_host = counts(llm)
        assert on_device == on_host > 0


def counts(llm: LLM) -> tuple[int, int]:
    returned = llm.engine.core.runner.returned
    lines, ended = returned.lines.counts.tolist()
    assert ended == 0
    return lines, returned._num_launched


def params_of(asked: dict[str, Any], max_tokens: int) -> SamplingParams:
    return SamplingParams(**asked, max_tokens=max_tokens, ignore_eos=True)


def tokens_of(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> list[list[int]]:
    outputs = llm.generate(prompts, params)
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("asked", PLAIN + FILTERED + ADJUSTED, ids=str)
def test_the_cheapest_kind(asked: dict[str, Any]) -> None:
    wanted = Kind.PLAIN if asked in PLAIN else Kind.FILTERED if asked in FILTERED else Kind.ADJUSTED
    assert Kind.of(SamplingParams(**asked)) is wanted
    # A greedy request has nothing to filter.
    filters = {name: value for name, value in asked.items() if name in ("top_k", "top_p", "min_p")}
    assert Kind.of(SamplingParams(temperature=0, **filters)) is Kind.PLAIN
    under_a_grammar = Kind.of(SamplingParams(**asked, structured_outputs=StructuredOutputs(regex="a*")))
    assert under_a_grammar is max(wanted, Kind.ADJUSTED)


def sampled_rows(llm: LLM) -> int:
    """Requests that sampling graphs have worked on, padding not counted."""
    report = llm.sampling_report()
    assert report is not None
    return round(sum(row.replays * row.num_tokens * (1 - row.padding_waste) for row in report.graphs))


@pytest.mark.parametrize("ahead", STEPS_AHEAD)
def test_only_those_who_ask_for_more_are_served_by_another_graph(shallow: TinyModel, ahead: int) -> None:
    """Four tokens of one request, in company that goes on for longer."""
    with engine(shallow, steps_ahead=ahead) as llm:
        for asked in (PLAIN[1], FILTERED[0], *ADJUSTED):
            before, lines, rows = sampling_of(llm), counts(llm)[0], sampled_rows(llm)
            params = [params_of(asked, 4), *(params_of(plain, 12) for plain in PLAIN)]
            tokens_of(llm, PROMPTS, params)
            # Behind the prompts' step all are sampled; then that request, as long as it is there.
            alone = 0 if asked in PLAIN else 4
            assert sampling_of(llm).since(before).steps == 1 + alone
            assert sampled_rows(llm) - rows == len(PROMPTS) + alone
            assert counts(llm)[0] - lines == 12, "one line a step"


@pytest.mark.parametrize("asked", [FILTERED[1], ADJUSTED[0], ADJUSTED[1]], ids=str)
def test_a_steady_step_uploads_nothing(
    shallow: TinyModel, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    """Plain requests and others side by side: inputs are filled when somebody joins or leaves."""
    fills: list[set[str]] = []
    fill_as = InputBuffers.fill_as

    def filled(self: InputBuffers, plan: Any, batch: Any, **options: Any) -> None:
        fills.append(set(batch))
        fill_as(self, plan, batch, **options)

    with engine(shallow, cuda_graph_mode="full") as llm:
        monkeypatch.setattr(InputBuffers, "fill_as", filled)
        params = [params_of(one, 14) for one in (asked, PLAIN[0], PLAIN[1])]
        tokens_of(llm, [{"prompt_token_ids": [1, 2]}] * 3, params)
        # Of the prompts' step and of the first decode step.
        wanted = [{"rows", "places"}] * 2
        assert [names for names in fills if names == {"rows", "places"}] == wanted
        assert len([names for names in fills if names == {"req_rows"}]) == 1
        report = llm.sampling_report()
        assert report is not None
        assert report.replays == 1 + 14


def test_the_host_looks_at_those_who_ask_for_logprobs_alone(
    shallow: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[str] = []
    logprobs_of = flight._logprobs

    def noted(request: Request, *others: Any) -> Any:
        looked_at.append(request.request_id)
        return logprobs_of(request, *others)

    with engine(shallow) as llm:
        monkeypatch.setattr(flight, "_logprobs", noted)
        asking = llm.engine.add({"prompt_token_ids": [1, 2]}, params_of({"logprobs": 2}, 9))
        for _ in range(3):
            llm.engine.add({"prompt_token_ids": [3, 4]}, params_of(PLAIN[0], 9))
        while llm.engine.has_work:
            llm.engine.step()
    assert looked_at == [asking.request_id] * 9
    assert [len(each) >= 2 for each in asking.outputs[0].logprobs or []] == [True] * 9


@pytest.mark.parametrize(
    ("mode", "ahead"),
    [
        (mode, ahead)
        if (mode, ahead) in (("none", 1), ("full", 1), ("full-and-piecewise", 1), ("full-and-piecewise", 0))
        else pytest.param(mode, ahead, marks=pytest.mark.slow)
        for mode, ahead in itertools.product(MODES, (0, 1))
    ],
)
def test_every_mix_of_kinds_gives_each_its_own_tokens(shallow: TinyModel, mode: str, ahead: int) -> None:
    rng = random.Random(7)
    asked = [rng.choice(PLAIN + FILTERED + ADJUSTED) for _ in range(24)]
    params = [params_of(one, rng.randint(3, 14)) for one in asked]
    prompts = prompts_of([rng.randint(1, 25) for _ in asked], seed=3)
    with engine(shallow, cuda_graph_mode=mode, steps_ahead=ahead) as llm:
        together = tokens_of(llm, prompts, params)
        alone = [tokens_of(llm, [prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
    assert together == alone


def test_a_row_forgets_the_kind_of_its_last_tenant(shallow: TinyModel) -> None:
    with engine(shallow, max_running_requests=1) as llm:
        wanted = {}
        for turn in range(3):
            for asked in (PLAIN[1], FILTERED[0], PLAIN[0], ADJUSTED[0], PLAIN[2], ADJUSTED[1]):
                [found] = tokens_of(llm, PROMPTS[:1], [params_of(asked, 6)])
                assert found == wanted.setdefault(str(asked), found), turn
        assert len({tuple(found) for found in wanted.values()}) >= 4


def test_batch_invariant_steps_are_not_decode_steps(shallow: TinyModel) -> None:
    """They sample behind the step."""
    with engine(shallow, batch_invariant=True, cuda_graph_prefill_tokens=None) as llm:
        tokens_of(llm, PROMPTS, [params_of(PLAIN[1], 6)] * 4)
        assert sampling_of(llm).steps == 6
        assert not llm.engine.core.runner.has_sampled


def test_embeddings_beside_generation_write_no_line(shallow: TinyModel) -> None:
    with engine(shallow) as llm:
        wanted = tokens_of(llm, PROMPTS[:1], [params_of(PLAIN[1], 6)])
        lines = counts(llm)
        llm.embed(PROMPTS)
        assert counts(llm) == lines
        assert tokens_of(llm, PROMPTS[:1], [params_of(PLAIN[1], 6)]) == wanted


# -- the ring --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", STEPS_AHEAD)
@pytest.mark.parametrize("at", [1, 2, 5])
def test_an_interrupt_while_tokens_are_waited_for_leaves_an_engine_that_works(
    shallow: TinyModel, monkeypatch: pytest.MonkeyPatch, at: int, ahead: int
) -> None:
    with LLM(shallow.directory, **{**SMALL, "steps_ahead": ahead}) as llm:
        params = [params_of({"temperature": 0}, 8) for _ in PROMPTS]
        wanted = tokens_of(llm, PROMPTS, params)
        read, reads = Launched.read, itertools.count(1)

        def interrupted(self: Launched) -> Sampled:
            if next(reads) == at:
                raise KeyboardInterrupt
            return read(self)

        monkeypatch.setattr(Launched, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, params)
        assert tokens_of(llm, PROMPTS, params) == wanted


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_lines_are_those_of_their_step_as_long_as_they_are_unread(lookahead: int) -> None:
    """Steps that ended and steps that failed in any order, read as late as the engine ever does."""
    rng = random.Random(lookahead)
    last_tokens, began = torch.zeros(9, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    returned = TokenReturn(last_tokens, began, 8, 2 * (lookahead + 2))
    unread: list[tuple[list[int], Launched]] = []
    for _ in range(200):
        num_requests = rng.randint(1, 8)
        rows = torch.randperm(8)[:num_requests].int() + 1
        for _ in range(rng.choice([1, 2])):
            tokens = torch.randint(0, 1000, (num_requests,))
            return_tokens(rows, tokens, returned.lines)
            returned.launched()
        unread.append((tokens.tolist(), returned.newest(num_requests)))
        assert last_tokens[rows.long()].tolist() == tokens.tolist()
        if len(unread) > lookahead + 1:
            wanted, launched = unread.pop(0)
            assert launched.read().tokens.tolist() == wanted


def test_after_a_doubt_the_device_goes_on_with_the_count_of_the_host() -> None:
    last_tokens, began = torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    returned = TokenReturn(last_tokens, began, 2, 4)
    rows, tokens = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([5, 6])
    return_tokens(rows, tokens, returned.lines)
    returned.launched()
    return_tokens(rows, tokens, returned.lines)  # launched, and nobody was told
    returned.settle()
    assert returned.lines.counts.tolist() == [2, 0], "there was no doubt"
    returned.doubt()
    returned.settle()
    for step in range(9):
        return_tokens(rows, tokens + step, returned.lines)
        returned.launched()
        assert returned.newest(2).read().tokens.tolist() == [5 + step, 6 + step]
    returned.launched()  # counted, and never launched
    with pytest.raises(AssertionError, match="another step"):
        returned.newest(2).read()


def test_a_line_that_should_have_been_amended_and_was_not_is_noticed() -> None:
    last_tokens, began = torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    returned = TokenReturn(last_tokens, began, 2, 4)
    amendment = Amendment(np.array([1]), LogprobLines.of(returned.lines, 2))
    rows, tokens = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([5, 0])
    return_tokens(rows, tokens, returned.lines)
    returned.launched()
    assert returned.newest(2).read().logprobs is None
    with pytest.raises(AssertionError, match="ask for more"):
        returned.newest(2, amendment).read()
    returned.lines.ring[0, 3] = 1
    with pytest.raises(AssertionError, match="ask for more"):
        returned.newest(2).read()
    amendment.logprobs.ranks[0, 0] = 7
    sampled = returned.newest(2, amendment).read()
    assert sampled.ranks is not None
    assert sampled.ranks.tolist() == [0, 7], "by place"


def test_a_row_has_what_its_tenant_asks_for_whoever_had_it_before(tiny: TinyModel) -> None:
    """Of plain sampling it is written once, as long as all ask for the same."""
    other: list[dict[str, Any]] = [{"temperature": 0, "top_k": 5}, {"seed": 3, "temperature": 0.6}]
    asked = [*PLAIN, *FILTERED, *ADJUSTED, *other]
    order = random.Random(5).choices(asked, k=60)
    with engine(tiny, max_running_requests=1, cuda_graph_mode="none") as llm:
        rows, num_skipped = llm.engine.core.runner.rows, 0
        for before, options in itertools.pairwise([*PLAIN, *order]):
            params = SamplingParams(max_tokens=3, stop_token_ids=[7], **options)
            with mock.patch.object(rows, "write", wraps=rows.write) as write:
                llm.generate(PROMPTS[0], params, use_tqdm=False)
            num_skipped += not write.called
            assert write.called or before == options
            found = {name: rows[name][1].tolist() for name in ("temperature", "seeds", "top_k", "top_p")}
            wanted = {"temperature": 0.0 if params.is_greedy else params.temperature, "top_p": params.top_p}
            assert found == pytest.approx(wanted | {"seeds": params.seed or 0, "top_k": params.top_k})
            assert bool(rows["is_plain"][1]) == (options in PLAIN or options in other)
            assert rows["num_biases"][1] == len(params.logit_bias or {})
            assert rows["frequency"][1].item() == pytest.approx(params.frequency_penalty)
            assert rows["num_logprobs"][1] == (-1 if params.logprobs is None else params.logprobs)
            assert (rows["banned"][1].max() >= 0) == bool(params.min_tokens)
        assert num_skipped
