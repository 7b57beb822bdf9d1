"""What a time between two tokens (`target_itl_ms`) costs and brings, computed from measured times of steps.

python -m ostinato.bench.chunk_simulation [FILE]

The engine's own scheduler serves the loads of `mixed_load.py` and `latency_under_prompts.py` against a clock
that adds up what steps take: a + b * tokens + c * pairs of query and key + d * contexts, from the committed
results of an H200. The host takes no time here. Nothing in the table is measured but these four.
"""

import argparse
import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.cache.pages import PageAllocator
from ostinato.engine.parameters.sampling_params import SamplingParams
from ostinato.engine.scheduling.prompt_room import PromptBound
from ostinato.engine.scheduling.request import Request
from ostinato.engine.scheduling.scheduler import Scheduler
from ostinato.engine.scheduling.scheduler_config import SchedulerConfig
from ostinato.engine.scheduling.step_costs import StepCosts, StepSize
from ostinato.graphs import Ladder

from ..tools.results import write_json
from . import latency_under_prompts, mixed_load
from .repository import RESULTS
from .serving import plan

NOTE = (
    "computed from the times of steps in prompt-parts-, decode- and decode-context-*-h200.json, not measured"
)
CHUNK = 4096
SECONDS = 30.0
RATES = {"qwen3-0.6b": (8.0, 16.0, 32.0), "llama-3.1-8b": (1.0, 2.0, 4.0)}
BOUNDS = {"qwen3-0.6b": (None, 20.0, 10.0, 5.0), "llama-3.1-8b": (None, 80.0, 50.0, 25.0, 15.0)}
KV_BYTES = {"qwen3-0.6b": 28 * 8 * 128 * 4, "llama-3.1-8b": 32 * 8 * 128 * 4}
TOKENS_PER_PAIR = {"qwen3-0.6b": 2.6e-4, "llama-3.1-8b": 7.5e-5}
Arrival = tuple[float, int, int]
"""Second, tokens of the prompt, tokens of the answer."""


@dataclass(frozen=True)
class MeasuredCosts:
    """Milliseconds of a step, for a token, for a pair and for a token of context."""

    step: float
    token: float
    pair: float
    context: float

    def of(self, size: StepSize) -> float:
        """Seconds."""
        found = self.step + self.token * size.tokens + self.pair * size.pairs + self.context * size.contexts
        return found / 1e3


def _rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return found


def costs_of(model: str) -> MeasuredCosts:
    """From the results of an H200."""
    prompts = {row["prompts"]: row for row in _rows("prompt-parts-h200") if row["model"] == model}
    decode = {(row["batch"], row["input_len"]): row["tpot_ms"] for row in _rows(f"decode-{model}-h200")}
    contexts = {
        (row["batch"], row["input_len"]): row["tpot_ms"] for row in _rows("decode-context-qwen3-0.6b-h200")
    }
    step = decode[1, 128]
    short = prompts["32 x 512"]
    attention = short["kinds"]["attention"]["ms"]
    token = ((short["ms"] - attention) / 4 - step) / CHUNK
    pair = prompts["1 x 16,384"]["kinds"]["attention"]["ms"] / (16_384**2 / 2)
    context = (contexts[32, 8192] - contexts[32, 128]) / (32 * (8192 - 128))
    return MeasuredCosts(step, token, pair, context * KV_BYTES[model] / KV_BYTES["qwen3-0.6b"])


@dataclass
class Told:
    """When a request came and got its tokens."""

    came: float
    prompt: int
    tokens: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.came

    @property
    def gaps(self) -> list[float]:
        return np.diff(self.tokens).tolist()  # type: ignore[no-any-return]

    @property
    def tpot(self) -> float:
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)


class Simulation:
    """A scheduler, one step ahead of a device that is only a clock."""

    def __init__(self, model: str, bound_ms: float | None) -> None:
        self.costs = costs_of(model)
        ladder = Ladder.prefill(CHUNK)
        # Without a bound it notes nothing, and tells sizes only.
        self._sizes = PromptBound((bound_ms or 1.0) / 1e3, StepCosts(TOKENS_PER_PAIR[model]), ladder)
        self.bound = self._sizes if bound_ms is not None else None
        config = SchedulerConfig(256, CHUNK, 32_768, prefix_caching=False)
        self.scheduler = Scheduler(config, PageAllocator(200_000), prompt_bound=self.bound)
        self.now, self._free = 0.0, 0.0
        self._flights = deque[tuple[Any, float]]()
        self.told: dict[str, Told] = {}

    def add(self, came: float, prompt: int, answer: int | None) -> Told:
        name = str(len(self.told))
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        self.scheduler.add(Request(name, np.zeros(prompt, dtype=np.int64), params))
        self.told[name] = Told(came, prompt)
        return self.told[name]

    def run(self, arrivals: Iterable[Arrival], until: float | None = None) -> None:
        """Serve them, to their ends or until then."""
        waiting, flights, began = deque(arrivals), self._flights, self.now
        while until is None or self.now - began < until:
            while waiting and began + waiting[0][0] <= self.now:
                came, prompt, answer = waiting.popleft()
                self.add(began + came, prompt, answer)
            step = self.scheduler.schedule()
            if step is not None:
                seconds = self.costs.of(self._sizes.size_of(step))
                self._free = max(self._free, self.now) + seconds
                flights.append((step, self._free))
                if self.bound is not None:
                    self.bound.note(step, seconds)
            if flights and (step is None or len(flights) > 1):
                done, self.now = flights.popleft()
                found = self.scheduler.complete(done, np.ones(done.num_requests, dtype=np.int64))
                for request, _ in found.new_tokens():
                    self.told[request.request_id].tokens.append(self.now)
            elif step is None:
                if not waiting:
                    return
                self.now = began + waiting[0][0]


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """In milliseconds."""
    found = np.array(list(values)) * 1e3
    names = {"p50": 50, "p95": 95, "p99": 99, "max": 100}
    return {name: round(float(np.percentile(found, share)), 2) for name, share in names.items()}


def mixed(model: str) -> Iterator[dict[str, Any]]:
    """The load of mixed_load.py, for half a minute."""
    for rate in RATES[model]:
        planned = plan(mixed_load.load_at(rate, SECONDS, 1000, ""), model)
        arrivals = [(each.at, len(each.body["prompt"]), each.body["max_tokens"]) for each in planned]
        for bound in BOUNDS[model]:
            simulation = Simulation(model, bound)
            simulation.run(arrivals)
            told = list(simulation.told.values())
            is_long = mixed_load.LONG_LEN
            yield {
                "load": "mixed_load",
                "model": model,
                "rate": rate,
                "target_itl_ms": bound,
                "tpot_ms": percentiles(each.tpot for each in told if len(each.tokens) > 1),
                "itl_ms": percentiles(gap for each in told for gap in each.gaps),
                "ttft_ms": percentiles(each.ttft for each in told if each.prompt < is_long),
                "long_ttft_ms": percentiles(each.ttft for each in told if each.prompt >= is_long),
                "seconds": round(simulation.now, 2),
            }


def streams(model: str, rate: float) -> Iterator[dict[str, Any]]:
    """The load of latency_under_prompts.py, to compare with what was measured."""
    for bound in BOUNDS[model]:
        simulation = Simulation(model, bound)
        endless = [simulation.add(0.0, latency_under_prompts.STREAM_PROMPT, None) for _ in range(32)]
        simulation.run([], until=0.25)
        began, first = simulation.now, len(endless[0].tokens)
        arrivals = latency_under_prompts.arrivals(rate, 1000, latency_under_prompts.SECONDS)
        answer = latency_under_prompts.ANSWER_TOKENS
        simulation.run([(at, len(ids), answer) for at, ids in arrivals], until=latency_under_prompts.SECONDS)
        others = list(simulation.told.values())[len(endless) :]
        yield {
            "load": "latency_under_prompts",
            "model": model,
            "rate": rate,
            "target_itl_ms": bound,
            "itl_ms": percentiles(gap for each in endless for gap in each.gaps[first:]),
            "ttft_ms": percentiles(each.ttft for each in others if each.tokens),
            "output_tokens_per_s": round(
                sum(at > began for each in simulation.told.values() for at in each.tokens)
                / latency_under_prompts.SECONDS
            ),
        }


def main(file: Path | None) -> None:
    """Compute, print, and write if asked."""
    rows = list[dict[str, Any]]()
    for model, rate in (("qwen3-0.6b", 6.0), ("llama-3.1-8b", 1.0)):
        print(model, costs_of(model))
        for row in (*streams(model, rate), *mixed(model)):
            rows.append(row)
            print({key: value for key, value in row.items() if key != "model"}, flush=True)
    if file is not None:
        result = {"benchmark": "chunk simulation", "note": NOTE, "rows": rows}
        write_json(result, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?")
    main(parser.parse_args().file)
