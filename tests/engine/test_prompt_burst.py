"""Prompt steps that running requests sit out: which steps these are, and that no request can tell."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.engine.llm import LLM
from ostinato.engine.sampling_params import SamplingParams
from ostinato.engine.scheduling.request import RequestStatus
from ostinato.engine.scheduling.scheduled_step import ScheduledStep

from .conftest import TinyModel, prompts_of
from .expected_steps import Setup, Step, expected_steps, service_of
from .test_engine_greedy import assert_all_back
from .test_scheduler import GRAMMAR, Engine

LONG = SamplingParams(max_tokens=30, ignore_eos=True)


def crowd(**config: object) -> Engine:
    """Steps of 16 tokens, rows and pages for everybody; one token at a time is read back."""
    return Engine(**{"max_running": 8, "num_pages": 100, "lookahead": 0, "prompt_burst": 2} | config)


def kinds(engine: Engine, count: int) -> str:
    """The next steps, a letter each: prompts only, mixed, decodes only."""
    found = ""
    for _ in range(count):
        step = engine.launch()
        assert step is not None
        found += kind(step)
        engine.complete()
    return found


def kind(step: ScheduledStep) -> str:
    if step.is_uniform_decode:
        return "d"
    return "p" if len(step.prompt_tokens) == step.num_requests else "m"


@pytest.mark.parametrize(
    ("burst", "steps"), [(0, "pmmmmmmmmd"), (1, "ppmpmpmpdd"), (2, "pppmppmpdd"), (6, "pppppppddd")]
)
def test_a_burst_ends_with_a_step_for_all(burst: int, steps: str) -> None:
    """Nobody is there to sit out the first step; prompts of a step each take longer where decodes join."""
    engine = crowd(prompt_burst=burst)
    for at in range(7):
        engine.add([at] * 16, LONG)
    assert kinds(engine, 10) == steps
    engine.drain()
    for request in engine.requests:
        engine.check(request)


def test_all_decodes_that_sat_out_go_on_together() -> None:
    engine = crowd(lookahead=2)
    first, second = engine.add([1] * 8), engine.add([2] * 8)
    third, fourth = engine.add([3] * 16), engine.add([4] * 16)
    fifth = engine.add([5] * 16)
    taken = []
    for _ in range(4):
        step = engine.launch()
        assert step is not None
        taken.append(step.items)
        if len(engine.launched) > 2:
            engine.complete()
    assert taken[0] == [(first, 8), (second, 8)]
    assert taken[1:3] == [[(third, 16)], [(fourth, 16)]]
    # The longest first.
    assert taken[3] == [(third, 1), (fourth, 1), (first, 1), (second, 1), (fifth, 12)]
    engine.drain()


@pytest.mark.parametrize(("prompt", "steps"), [(3, "md"), (4, "pd")])
def test_less_than_a_quarter_of_a_step_is_not_worth_it(prompt: int, steps: str) -> None:
    engine = crowd()
    engine.add([1] * 5, LONG)
    kinds(engine, 2)
    engine.add([2] * prompt, LONG)
    assert kinds(engine, 2) == steps


@pytest.mark.parametrize(("prompt", "steps"), [(5, "md"), (6, "pd")])
def test_prompt_tokens_must_not_be_fewer_than_decodes(prompt: int, steps: str) -> None:
    engine = crowd()
    for at in range(6):
        engine.add([at], LONG)
    kinds(engine, 2)
    engine.add([9] * prompt, LONG)
    assert kinds(engine, 2) == steps


def test_where_decodes_take_most_of_a_step_nobody_sits_out() -> None:
    engine = crowd(max_running=12)
    for at in range(9):
        engine.add([at], LONG)
    kinds(engine, 2)
    engine.add([9] * 40, LONG)
    assert kinds(engine, 7) == "mmmmmmd"


def test_prompts_found_in_the_cache_do_not_count() -> None:
    engine = crowd()
    prompt = [1, 2, 3, 4] * 4
    engine.add([*prompt, 5], LONG)
    kinds(engine, 3)
    engine.add([*prompt, 6], LONG)
    assert kinds(engine, 1) == "m", "one token is left to compute"
    engine.add([7, *prompt], LONG)
    assert kinds(engine, 1) == "p"


@pytest.mark.parametrize(("num_pages", "steps"), [(100, "pd"), (25, "pd"), (24, "md")])
def test_where_pages_are_not_plenty_nobody_sits_out(num_pages: int, steps: str) -> None:
    engine = crowd(num_pages=num_pages)
    engine.add([1] * 13, LONG)
    kinds(engine, 1)
    # Of the 4-token pages a full step needs 4, and 8 rows need 16 more; 4 are taken, one is reserved.
    engine.add([2] * 14, LONG)
    assert kinds(engine, 2) == steps


def test_while_the_next_prompt_waits_for_pages_decodes_run() -> None:
    engine = crowd(num_pages=30, max_model_len=116)
    engine.add([1] * 16, LONG)
    kinds(engine, 1)
    waiting = engine.add([2] * 110, LONG)
    assert kinds(engine, 5) == "ddddd"
    assert waiting.status is RequestStatus.WAITING
    engine.drain()
    engine.check(waiting)


def test_a_long_prompt_alone_is_a_burst() -> None:
    engine = crowd()
    engine.add([1] * 4, LONG)
    kinds(engine, 1)
    engine.add([2] * 60, SamplingParams(max_tokens=2))
    assert kinds(engine, 5) == "ppmpd"
    engine.drain()


def test_a_whole_prompt_that_would_not_fit_beside_decodes_runs_without_them() -> None:
    without, having = (
        crowd(chunked_prefill=False, max_batched_tokens=64, prompt_burst=burst) for burst in (0, 1)
    )
    for engine in (without, having):
        for at in range(2):
            engine.add([at] * 4, LONG)
        kinds(engine, 1)
        for at in range(2):
            engine.add([2 + at] * 63, SamplingParams(max_tokens=1))
    assert kinds(having, 4) == "pdpd"
    assert kinds(without, 4) == "dddd"


def test_embeddings_come_in_bursts_too() -> None:
    engine = crowd()
    engine.add([1] * 4, LONG)
    kinds(engine, 1)
    for at in range(3):
        engine.embed([2 + at] * 16)
    assert kinds(engine, 5) == "ppmmd"
    engine.drain()


def test_a_grammar_makes_nobody_wait_for_longer() -> None:
    engine = crowd(lookahead=1, prompt_burst=1)
    bound = engine.add([1] * 16, LONG, grammar=GRAMMAR)
    free = engine.add([2] * 16, LONG)
    for at in range(5):
        engine.add([3 + at] * 16, LONG)
    taken = []
    for _ in range(6):
        step = engine.launch()
        assert step is not None
        taken.append((kind(step), bound in step.requests, free in step.requests))
        if len(engine.launched) > 1:
            engine.complete()
    # The second step is sat out by the one that is ready.
    assert taken[:2] == [("p", True, False), ("p", False, True)]
    assert taken[2:] == [("m", True, True), ("p", False, False)] * 2
    engine.drain()
    engine.check(bound)


def test_a_pause_in_a_burst_changes_nothing() -> None:
    engine = crowd()
    for at in range(5):
        engine.add([at] * 16, LONG)
    assert kinds(engine, 2) == "pp"
    engine.scheduler.pause()
    assert engine.launch() is None
    engine.scheduler.resume()
    assert kinds(engine, 3) == "pmp"
    engine.drain()


def test_an_aborted_prompt_ends_its_burst_and_decodes_go_on_as_they_were() -> None:
    engine = crowd()
    engine.add([1] * 4, LONG)
    kinds(engine, 1)
    before = engine.launch()
    engine.complete()
    prompt = engine.add([2] * 40)
    assert kinds(engine, 1) == "p"
    assert engine.scheduler.abort(prompt.request_id)
    after = engine.launch()
    assert before is not None
    assert after is not None
    assert after.rows is before.rows
    assert after.requests == before.requests
    engine.complete()
    engine.drain()


def test_bursts_do_not_cause_preemptions() -> None:
    """Requests that arrive one after another, on too few pages for as many as there are rows."""
    preemptions, num_sat_out = [], 0
    for burst in (0, 4):
        preemptions.append(0)
        for seed in range(8):
            random = np.random.default_rng(seed)
            engine = Engine(
                num_pages=45, max_running=10, max_batched_tokens=32, prefix_caching=False, prompt_burst=burst
            )
            for at in range(40):
                output = int(random.integers(1, 40))
                prompt = [at % 12] * int(random.integers(1, 41))
                engine.add(prompt, SamplingParams(max_tokens=output, ignore_eos=True))
                for _ in range(random.integers(9)):
                    engine.turn()
                    num_sat_out += bool(engine.sat_out)
            engine.drain()
            preemptions[-1] += engine.scheduler.num_preemptions
    without, having = preemptions
    assert num_sat_out > 20
    assert 50 < having <= 1.05 * without


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_steps_are_those_of_the_rules(data: st.DataObject) -> None:
    """Requests of all lengths at once, on many pages or few: step by step as the rules say."""
    length, running = 64, data.draw(st.integers(1, 6), label="running")
    chunked = data.draw(st.booleans(), label="chunked")
    budget = data.draw(st.integers(max(running, 4), 40), label="budget") if chunked else 70
    # With up to 16 free pages per request, decodes take one at a time, as the rules have it.
    pages = data.draw(st.integers(6, 17) | st.just(200), label="pages")
    # The rules do not say what a preemption makes of tokens under way.
    ahead = data.draw(st.integers(0, 2), label="ahead") if pages > 17 else 0
    burst = data.draw(st.integers(0, 5), label="burst")
    jobs = data.draw(
        st.lists(st.tuples(st.integers(1, 50), st.integers(0, 14)), min_size=1, max_size=12), label="jobs"
    )
    engine = Engine(
        num_pages=pages,
        page_size=16,
        max_running=running,
        max_batched_tokens=budget,
        max_model_len=length,
        chunked_prefill=chunked,
        prefix_caching=False,
        lookahead=ahead,
        prompt_burst=burst,
    )
    for at, (prompt, output) in enumerate(jobs):
        if output:
            engine.add([at % 12] * prompt, SamplingParams(max_tokens=output, ignore_eos=True))
        else:
            engine.embed([at % 12] * prompt)
    found = []
    while engine.scheduler.has_work:
        step = engine.launch()
        if step is not None:
            found.append(
                Step(step.total_tokens, step.num_requests, step.is_uniform_decode, bool(step.samples.any()))
            )
        if engine.launched and (step is None or len(engine.launched) > ahead):
            engine.complete()
    prompts, outputs = zip(*jobs, strict=True)
    assert found == expected_steps(
        prompts,
        outputs,
        running=running,
        budget=budget,
        chunked=chunked,
        ahead=ahead,
        pages=pages,
        burst=burst,
    )
    assert engine.pages.num_free == engine.pages.num_usable


@pytest.mark.parametrize(
    "setup",
    [
        Setup(pages=16, caching=False),
        Setup(pages=16, caching=False, ahead=1, mode="full"),
        Setup(pages=16, caching=False, chunked=False, token_rungs=(16, 64)),
    ],
    ids=["chunked", "ahead", "whole"],
)
def test_no_token_depends_on_bursts_also_with_preemption(tiny: TinyModel, setup: Setup) -> None:
    lengths, tokens = (33, 32, 31, 30, 29, 16), 30
    prompts = prompts_of(lengths, seed=8)
    services = []
    for burst in (0, 4):
        having = replace(setup, burst=burst)
        with LLM(tiny.directory, **having.options) as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens))
            for prompt, output in zip(prompts, outputs, strict=True):
                assert output.outputs[0].token_ids == tiny.greedy(tuple(prompt["prompt_token_ids"]), tokens)
            assert llm.engine.core.scheduler.num_preemptions > 0
            assert_all_back(llm)
            services.append(service_of(llm))
    assert services[0] != services[1], "nobody sat out"
