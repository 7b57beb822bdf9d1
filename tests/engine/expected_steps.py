"""What an engine must do for a set of greedy requests: its steps, and the graphs that serve them.

Written from the rules in the documents, not from the scheduler: first come first served; a step holds one
token of every request that decodes, then prompts in order up to the budget; a step without any prompt is a
decode step; every step takes the smallest graph of its mode that holds it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ostinato.engine.llm import LLM

PAGE = 16


@dataclass(frozen=True)
class Step:
    """The shape of one step."""

    tokens: int
    requests: int
    is_decode: bool
    """Whether every request goes on with its output, by one token."""
    samples: bool
    """Whether any request samples a token in it."""


@dataclass(eq=False)
class _Job:
    length: int
    """Tokens of prompt and output, those that are being sampled included."""
    end: int
    """Length at which it ends."""
    is_embedding: bool
    cached: int
    computed: int = 0
    """Tokens computed or being computed."""
    prefill: int = field(init=False)
    """Tokens to compute before it decodes."""
    pages: int = 0

    def __post_init__(self) -> None:
        self.prefill = self.length


def expected_steps(
    prompts: Sequence[int],
    outputs: Sequence[int] | int,
    *,
    running: int,
    budget: int,
    chunked: bool = True,
    cached: Sequence[int] | None = None,
    ahead: int = 0,
    pages: int | None = None,
) -> list[Step]:
    """The steps that serve prompts of these lengths, each for so many output tokens (0: an embedding).

    `cached`: prompt tokens found in the prefix cache. `ahead`: steps launched before the tokens of the last
    are read: a request then leaves that much later. `pages`: how many there are; without, enough.
    """
    counts = [outputs] * len(prompts) if isinstance(outputs, int) else list(outputs)
    hits = list(cached or [0] * len(prompts))
    waiting = [_Job(n, n + m, m == 0, hit) for n, m, hit in zip(prompts, counts, hits, strict=True)]
    world = _World(waiting, running, budget, chunked, pages)
    steps: list[Step] = []
    leaving: list[list[_Job]] = []
    while world.waiting or world.running or leaving:
        step, ended = world.advance()
        if step is not None:
            steps.append(step)
            leaving.append(ended)
        if leaving and (step is None or len(leaving) > ahead):
            world.leave(leaving.pop(0))
    return steps


class _World:
    def __init__(self, waiting: list[_Job], most: int, budget: int, chunked: bool, pages: int | None) -> None:
        self.waiting, self.running = waiting, list[_Job]()
        self.most, self.budget, self.chunked = most, budget, chunked
        self.free = 10**9 if pages is None else pages - 1

    def advance(self) -> tuple[Step | None, list[_Job]]:
        """The next step, and who ends with it."""
        self._give_pages_to_decodes()
        decodes = [(job, 1) for job in self._decodes()]
        prompts = self._prompts(self.budget - len(decodes))
        chunks = decodes + prompts
        if not chunks:
            return None, []
        for job, count in chunks:
            job.computed += count
        done = [job for job, _ in chunks if job.computed >= job.prefill]
        sampling = [job for job in done if not job.is_embedding]
        for job in sampling:
            job.length += 1
        ended = [job for job in done if job.length == job.end]
        tokens = sum(count for _, count in chunks)
        return Step(tokens, len(chunks), not prompts, bool(sampling)), ended

    def leave(self, jobs: list[_Job]) -> None:
        for job in jobs:
            self.running.remove(job)
            self.free += job.pages

    def _decodes(self) -> list[_Job]:
        return [job for job in self.running if job.computed >= job.prefill and job.length < job.end]

    def _give_pages_to_decodes(self) -> None:
        for job in self._decodes():
            if job not in self.running or job.computed < job.pages * PAGE:
                continue
            while job in self.running and self.free < 1:
                self._preempt(self.running[-1])
            if job in self.running:
                self._take(job, 1)

    def _preempt(self, job: _Job) -> None:
        self.running.remove(job)
        self.free += job.pages
        job.pages = job.computed = 0
        job.prefill = job.length
        self.waiting.insert(0, job)

    def _take(self, job: _Job, count: int) -> None:
        job.pages += count
        self.free -= count

    def _prompts(self, budget: int) -> list[tuple[_Job, int]]:
        chunks: list[tuple[_Job, int]] = []
        for job in self.running:
            if job.computed < job.prefill:
                count = min(job.prefill - job.computed, budget)
                needed = -(-(job.computed + count) // PAGE) - job.pages
                if needed <= self.free:
                    self._take(job, needed)
                    chunks.append((job, count))
                    budget -= count
        while self.waiting and budget and len(self.running) < self.most:
            job = self.waiting[0]
            rest = job.length - job.cached
            if (rest > budget and not self.chunked) or not self._has_room_for(job):
                break
            self.running.append(self.waiting.pop(0))
            count = min(rest, budget)
            job.computed = job.cached
            self._take(job, -(-(job.cached + count) // PAGE))
            chunks.append((job, count))
            budget -= count
        return chunks

    def _has_room_for(self, job: _Job) -> bool:
        """All it needs, beside what a prompt under way still needs and a page for each decode."""
        if not self.running:
            return True
        promised = sum(
            -(-other.prefill // PAGE) - other.pages
            for other in self.running
            if other.computed < other.prefill
        )
        decoding = sum(other.computed >= other.prefill and not other.is_embedding for other in self.running)
        return -(-job.length // PAGE) + promised + decoding <= self.free


@dataclass(frozen=True)
class Service:
    """How steps were served: replays by graph (mode, decode or mixed, tokens), eager steps by reason."""

    replays: dict[tuple[str, str, int], int]
    eager: dict[str, int]

    @property
    def steps(self) -> int:
        """All of them."""
        return sum(self.replays.values()) + sum(self.eager.values())

    def since(self, before: "Service") -> "Service":
        """What came after an earlier look."""
        replays = Counter(self.replays)
        replays.subtract(before.replays)
        eager = Counter(self.eager)
        eager.subtract(before.eager)
        return Service(dict(+replays), dict(+eager))


def expected_service(
    steps: Sequence[Step], mode: str, decode_rungs: Sequence[int], token_rungs: Sequence[int]
) -> Service:
    """How a mode with these ladders must serve these steps."""
    replays: Counter[tuple[str, str, int]] = Counter()
    eager: Counter[str] = Counter()
    for step in steps:
        graph = _graph_for(step, mode, decode_rungs, token_rungs)
        if isinstance(graph, str):
            eager[graph] += 1
        else:
            replays[graph] += 1
    return Service(dict(replays), dict(eager))


def _graph_for(
    step: Step, mode: str, decode_rungs: Sequence[int], token_rungs: Sequence[int]
) -> tuple[str, str, int] | str:
    if mode == "none":
        return "disabled"
    if mode == "full-decode-only" and not step.is_decode:
        return "mixed-batch"
    mixed = [] if mode == "full-decode-only" else [rung for rung in token_rungs if rung >= step.tokens]
    mixed_mode = "full" if mode == "full" else "piecewise"
    decode = [rung for rung in decode_rungs if rung >= step.requests] if step.is_decode else []
    if mode == "piecewise" or not decode:
        return (mixed_mode, "mixed", min(mixed)) if mixed else "larger-than-max"
    if mode == "full" and mixed and min(mixed) < min(decode):
        return "full", "mixed", min(mixed)
    return "full", "decode", min(decode)


@dataclass(frozen=True)
class Setup:
    """Limits and ladders of an engine under test: its options, and what must follow from them."""

    mode: str = "full-and-piecewise"
    decode_rungs: tuple[int, ...] = (1, 2, 4)
    token_rungs: tuple[int, ...] = (8, 16)
    running: int = 4
    budget: int = 16
    """Tokens of a step."""
    chunked: bool = True
    ahead: int = 0
    pages: int = 40
    length: int = 64
    """The longest request."""
    caching: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of `LLM`."""
        return {
            "cuda_graph_mode": self.mode,
            "cuda_graph_bs": self.decode_rungs,
            "cuda_graph_prefill_tokens": self.token_rungs,
            "max_running_requests": self.running,
            "chunked_prefill_size": self.budget,
            "enable_chunked_prefill": self.chunked,
            "steps_ahead": self.ahead,
            "num_pages": self.pages,
            "max_model_len": self.length,
            "enable_prefix_caching": self.caching,
            # Freezing the collector collects first, which takes longer than capturing a tiny model.
            "enable_cudagraph_gc": True,
        }

    def steps(
        self, prompts: Sequence[int], outputs: Sequence[int] | int, cached: Sequence[int] | None = None
    ) -> list[Step]:
        """The steps for prompts of these lengths, served together."""
        return expected_steps(
            prompts,
            outputs,
            running=self.running,
            budget=self.budget if self.chunked else max(self.budget, self.length),
            chunked=self.chunked,
            cached=cached,
            ahead=self.ahead,
            pages=self.pages,
        )

    def service(self, steps: Sequence[Step]) -> Service:
        """How these steps must be served."""
        return expected_service(steps, self.mode, self.decode_rungs, self.token_rungs)

    def sampling(self, steps: Sequence[Step], *, is_plain: bool = True) -> Service:
        """The same for sampling behind steps; which graph serves it is not told apart: see `sampling_of`.

        Decode steps, but not those from a graph for mixed ones, have plain sampling inside. `is_plain`: no
        request asks for more than a temperature and a seed; else those who do get a graph of their own.
        """
        count = sum(step.samples and not self._has_sampling(step) for step in steps)
        count += 0 if is_plain else sum(step.samples for step in steps)
        if self.mode == "none":
            return Service({}, {"disabled": count} if count else {})
        return Service({_SAMPLING: count} if count else {}, {})

    def _has_sampling(self, step: Step) -> bool:
        graph = _graph_for(step, self.mode, self.decode_rungs, self.token_rungs)
        return step.is_decode and (isinstance(graph, str) or graph[1] == "decode")


_SAMPLING = ("full", "sampling", 0)


def service_of(llm: LLM) -> Service:
    """How all steps so far were served."""
    report = llm.graph_report()
    assert not report.failures
    replays: Counter[tuple[str, str, int]] = Counter()
    for row in report.graphs:
        # Graphs of several context lengths count as one.
        replays[row.mode, row.descriptor.split()[0], row.num_tokens] += row.replays
    return Service(dict(+replays), dict(report.eager_steps))


def sampling_of(llm: LLM) -> Service:
    """How all sampling steps so far were served; which graph replayed them is not told apart."""
    report = llm.sampling_report()
    assert report is not None
    assert not report.failures
    replays = {_SAMPLING: report.replays} if report.replays else {}
    return Service(replays, dict(report.eager_steps))


def computed_tokens(llm: LLM) -> int:
    """Tokens that replays have computed, without padding."""
    real = sum(row.replays * row.num_tokens * (1 - row.padding_waste) for row in llm.graph_report().graphs)
    return round(real)
