"""Interrupts at random moments: each ends its call, with all that the call began, and nothing else."""

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest

from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams

from .conftest import TinyModel, prompts_of
from .test_engine_greedy import GREEDY, SMALL
from .test_misuse_calls import assert_serves_on, right

pytestmark = pytest.mark.usefixtures("ctrl_c")

GOOD = prompts_of((5, 20, 33, 9))
LONG = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
STOPS = SamplingParams(seed=3, max_tokens=10, ignore_eos=True, stop=["never said"], logprobs=2, n=2)


class GivenUp(Exception):
    """What a handler of the user's own raises."""


@contextmanager
def interrupted(after: float, kind: str) -> Iterator[None]:
    """After so many seconds Ctrl-C is pressed, or a timer of the user's rings."""

    def ring(number: int, frame: FrameType | None) -> None:
        if kind == "timer":
            raise GivenUp
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, after)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def stream_all(llm: LLM) -> None:
    for _ in llm.stream(GOOD[1], LONG):
        pass


CALLS: dict[str, Callable[[LLM], object]] = {
    "list": lambda llm: llm.generate(GOOD, [LONG, STOPS, LONG, STOPS]),
    "one": lambda llm: llm.generate(GOOD[2], STOPS),
    "stream": stream_all,
    "embed": lambda llm: llm.embed(GOOD * 4),
}


def run(llm: LLM, model: TinyModel, kind: str, count: int, seed: int) -> None:
    chance = random.Random(seed)
    took = {}
    for name, call in CALLS.items():
        call(llm)
        began = time.perf_counter()
        call(llm)
        took[name] = time.perf_counter() - began
    handler = signal.getsignal(signal.SIGINT)
    num_interrupted = 0
    for _ in range(count):
        name = chance.choice(list(CALLS))
        try:
            with interrupted(max(1e-6, chance.uniform(-0.05, 0.9) * took[name]), kind):
                CALLS[name](llm)
        except (KeyboardInterrupt, GivenUp):
            num_interrupted += 1
        assert signal.getsignal(signal.SIGINT) is handler
        engine = llm.engine
        engine.core.settle()  # a step ahead may be under way, for nobody
        assert not engine.has_work, f"{name} left requests behind"
        scheduler = engine.core.scheduler
        assert scheduler.pages.num_free == scheduler.pages.num_usable, f"{name} left pages behind"
        scheduler.check_integrity()
    assert num_interrupted > count / 5  # times vary on a busy machine
    assert_serves_on(llm, model)
    for prompt, output in zip(GOOD, llm.generate(GOOD, GREEDY), strict=True):
        assert output.outputs[0].token_ids == right(model, prompt)


@pytest.fixture(scope="module")
def llm(tiny_text: TinyModel) -> Iterator[LLM]:
    with LLM(tiny_text.directory, **SMALL) as llm:
        yield llm


@pytest.mark.parametrize("kind", ["ctrl-c", "timer"])
def test_interrupts_at_random_moments(llm: LLM, tiny_text: TinyModel, kind: str) -> None:
    run(llm, tiny_text, kind, 25 if kind == "ctrl-c" else 10, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ctrl-c", "timer"])
@pytest.mark.parametrize("seed", range(4))
def test_many_interrupts_at_random_moments(llm: LLM, tiny_text: TinyModel, kind: str, seed: int) -> None:
    run(llm, tiny_text, kind, 100, seed)


def test_a_storm_of_interrupts(llm: LLM, tiny_text: TinyModel) -> None:
    """The next comes while the last is still being dealt with."""
    number = 0

    def ring(*_: Any) -> None:
        nonlocal number
        number += 1
        if number < 100:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.0005)
        while number < 100:
            with suppress(KeyboardInterrupt):
                llm.generate(GOOD, LONG)
    except KeyboardInterrupt:
        pass
    finally:
        number = 1000
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert_serves_on(llm, tiny_text)


def test_a_handler_that_raises_nothing_changes_nothing(llm: LLM, tiny_text: TinyModel) -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(0))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        outputs = llm.generate(GOOD, GREEDY)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rung
    for prompt, output in zip(GOOD, outputs, strict=True):
        assert output.outputs[0].token_ids == right(tiny_text, prompt)


@pytest.mark.parametrize("methods", [("add",), ("step",), ("step", "abort")], ids="-".join)
def test_an_interrupt_where_an_output_is_known_to_nobody(
    llm: LLM, tiny_text: TinyModel, monkeypatch: pytest.MonkeyPatch, methods: tuple[str, ...]
) -> None:
    """At the end of `add` it is queued and not returned yet; while a call ends, another interrupt comes."""
    engine = llm.engine
    for method in methods:

        def pressed(*args: Any, call: Callable[..., Any] = getattr(engine, method), **options: Any) -> Any:
            result = call(*args, **options)
            signal.raise_signal(signal.SIGINT)
            return result

        monkeypatch.setattr(engine, method, pressed)
    for call in CALLS.values():
        if methods != ("add",) or call is not CALLS["embed"]:
            with pytest.raises(KeyboardInterrupt):
                call(llm)
    monkeypatch.undo()
    assert_serves_on(llm, tiny_text)
