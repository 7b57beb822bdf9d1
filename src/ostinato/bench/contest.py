"""Runs the same workloads on several engines, Ostinato and others, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams

from ..tools.results import BenchError, tell
from .engine_facts import engine_facts
from .subject import Subject
from .workload import Workload

OURS = "ostinato"
"""Ostinato's name among the contestants."""

Measured = TypeVar("Measured")


@dataclass(frozen=True)
class Run:
    """A workload that was served."""

    seconds: float
    tokens: list[list[int]]
    """Per request, in order; as many as requested."""

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second."""
        return sum(map(len, self.tokens)) / self.seconds


class Contestant(Protocol):
    """An engine that is ready to serve."""

    @property
    def name(self) -> str:
        """Its name in the result."""

    def serves(self, workload: Workload) -> bool:
        """Whether it takes part in this workload."""

    def run(self, workload: Workload) -> Run:
        """Serve the whole workload. Raises BenchError if the outputs are not as requested."""


Starter = Callable[[], AbstractContextManager[Sequence[Contestant]]]
"""Starts one engine, which may compete in several ways, and stops it."""


class Ours:
    """`LLM.generate`, as a user calls it: token ids in and out, greedy."""

    name = OURS

    def __init__(self, llm: LLM, *, detokenize: bool = False) -> None:
        self.llm = llm
        self._detokenize = detokenize

    def serves(self, workload: Workload) -> bool:
        """Always."""
        return True

    def run(self, workload: Workload) -> Run:
        """Serve the workload; the time is that of the one call."""
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in workload.prompts]
        params = [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=self._detokenize)
            for length in workload.output_lens
        ]
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, params)
        seconds = time.perf_counter() - started
        for output in outputs:
            if output.error is not None:
                raise BenchError(f"a request failed: {output.error}")
        return checked(Run(seconds, [output.outputs[0].token_ids for output in outputs]), workload, self.name)


def checked(run: Run, workload: Workload, name: str) -> Run:
    """The run, if every request got as many tokens as it asked for."""
    counts = tuple(map(len, run.tokens))
    if counts != workload.output_lens:
        raise BenchError(
            f"{name} returned {sum(counts)} tokens for {len(counts)} requests, "
            f"but {workload.output_tokens} for {len(workload)} were requested: the figures mean nothing"
        )
    return run


def equal_share(left: Run, right: Run) -> float:
    """Share of the tokens that are the same in both runs of a workload."""
    pairs = [
        pair
        for mine, other in zip(left.tokens, right.tokens, strict=True)
        for pair in zip(mine, other, strict=True)
    ]
    return sum(one == two for one, two in pairs) / len(pairs)


def ours(subject: Subject, workloads: Sequence[Workload], facts: dict[str, Any]) -> Starter:
    """Our engine, large enough for these workloads; when it stops, it writes its facts into `facts`."""

    @contextmanager
    def start() -> Iterator[Sequence[Contestant]]:
        batch, length = max(map(len, workloads)), max(workload.longest for workload in workloads)
        with subject.start(batch, length) as llm:
            yield [Ours(llm)]
            facts.update(engine_facts(llm))

    return start


def compete(
    starters: Sequence[Starter],
    workloads: Sequence[Workload],
    measure: Callable[[Contestant, Workload], Measured],
    *,
    repeats: int,
    together: bool,
) -> list[dict[str, list[Measured]]]:
    """Per workload, each contestant's measurements.

    `together`: all engines run at the same time and take turns (A B A B), so that changes of the machine's
    speed affect all of them. Otherwise one engine after the other, each with the whole machine.
    """
    found: list[dict[str, list[Measured]]] = [{} for _ in workloads]
    for group in [starters] if together else [[starter] for starter in starters]:
        with ExitStack() as stack:
            tell("starting")
            contestants = [each for starter in group for each in stack.enter_context(starter())]
            for workload, measured in zip(workloads, found, strict=True):
                taking_part = [each for each in contestants if each.serves(workload)]
                for contestant in taking_part:
                    contestant.run(workload.shortened(2))
                for _ in range(repeats):
                    for contestant in taking_part:
                        tell(f"{contestant.name}, {workload}")
                        measured.setdefault(contestant.name, []).append(measure(contestant, workload))
    return found
