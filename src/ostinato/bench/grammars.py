"""Steps of a batch in which some requests are under a grammar: do they keep pace, and what do they cost?

python -m ostinato.bench.grammars benchmarks/results/grammars-h200.json
python -m ostinato.bench.grammars /tmp/grammars.json --model llama-3.2-1b --batch 64

All requests decode side by side, random weights, one step ahead. The grammar is one that allows every third
token, another third in each step: every mask changes and is sent. Beside it the same batch with as many
requests that ask for logprobs, which are sampled by the same graph and follow nothing. What it costs to ask
the process of a grammar is measured by `grammar_processes.py`.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any, cast

import numpy as np

from ostinato import LLM, SamplingParams
from ostinato.engine.core import EngineCore
from ostinato.engine.scheduling.request import Request
from ostinato.engine.token_ids import token_array
from ostinato.grammars.followed_text import FollowedText, Standing
from ostinato.text.grammar import Mask
from ostinato.text.structured import StructuredOutputs

from ..tools.machine import machine
from ..tools.results import write_json
from .repository import MODELS

PROMPT_LEN, OUTPUT_LEN, REPEATS = 64, 256, 3


class EveryThird:
    """A `FollowedText` without a process: allows every third token, beginning one further behind each."""

    is_parked = False

    def __init__(self, words: int) -> None:
        bits = (np.arange(32 * words) % 3 == np.arange(3)[:, None]).reshape(3, words, 32)
        self._masks = np.packbits(bits, axis=2, bitorder="little").view(np.int32).reshape(3, words)
        self.num_tokens = 0
        self.standing = Standing.READY

    def begin(self) -> None:
        """There is nothing to compile."""

    def close(self) -> None:
        """There is nothing to end."""

    def catch_up(self, tokens: list[int]) -> None:
        """As `FollowedText.catch_up`."""
        self.num_tokens, self.standing = len(tokens), Standing.FOLLOWS

    def fill(self, mask: Mask) -> None:
        """As `FollowedText.fill`."""
        mask[:] = self._masks[self.num_tokens % 3]

    def accept(self, token: int) -> None:
        """As `FollowedText.accept`."""
        if token % 3 != self.num_tokens % 3:
            self.standing = Standing.REFUSED
        self.num_tokens += 1


def requests_of(core: EngineCore, batch: int, num_asking: int, kind: str) -> list[Request]:
    """The first ones ask for something."""
    vocab, draw = core.loaded.model.config.vocab_size, np.random.default_rng(0)
    words = -(-vocab // 32)
    found = []
    for at in range(batch):
        asks = kind if at < num_asking else "nothing"
        params = SamplingParams(
            temperature=0,
            max_tokens=OUTPUT_LEN,
            ignore_eos=True,
            # Only to be sampled as such; what it follows is the made-up one below.
            structured_outputs=StructuredOutputs(regex="a*") if asks == "grammar" else None,
            logprobs=0 if asks == "logprobs" else None,
        )
        prompt = token_array(draw.integers(0, vocab, PROMPT_LEN).tolist())
        grammar = cast(FollowedText, EveryThird(words)) if asks == "grammar" else None
        found.append(Request(f"{time.perf_counter_ns()} {at}", prompt, params, grammar=grammar))
    return found


def measured(core: EngineCore, batch: int, num_asking: int, kind: str) -> dict[str, Any]:
    """One row of the result: milliseconds of a step, and tokens a step of those who ask and the others."""
    times, pace = [], {"asking": 0.0, "others": 0.0}
    for _ in range(REPEATS + 1):
        requests = requests_of(core, batch, num_asking, kind)
        for request in requests:
            core.add(request)
        while min(request.num_output_tokens for request in requests) < 2:
            core.step()
        before = [request.num_output_tokens for request in requests]
        began, steps = time.perf_counter(), OUTPUT_LEN // 2
        for _ in range(steps):
            core.step()
        times.append((time.perf_counter() - began) / steps * 1e3)
        gained = [
            (request.num_output_tokens - count) / steps
            for request, count in zip(requests, before, strict=True)
        ]
        pace["asking"] = statistics.mean(gained[:num_asking]) if num_asking else 0.0
        pace["others"] = statistics.mean(gained[num_asking:])
        while core.has_work:
            core.step()
        assert not any(request.error for request in requests), requests[0].error
    return {
        "asking": num_asking,
        "for": kind,
        "step_ms": statistics.median(times[1:]),  # the first is a warm-up
        "step_ms_each": times[1:],
        "tokens_a_step": pace,
    }


def main(file: Path, model: str, batch: int) -> None:
    """Measure, print and write."""
    with LLM(
        str(MODELS / model),
        load_format="dummy",
        max_model_len=PROMPT_LEN + OUTPUT_LEN,
        max_running_requests=batch,
    ) as llm:
        rows = []
        print("asking  for        step ms  tokens a step: asking, others")
        asked = [(count, kind) for count in (1, batch // 2) for kind in ("logprobs", "grammar")]
        for num_asking, kind in [(0, "nothing"), *asked]:
            row = measured(llm.engine.core, batch, num_asking, kind)
            rows.append(row)
            pace = ", ".join(f"{tokens:.2f}" for tokens in row["tokens_a_step"].values())
            print(f"{num_asking:6d}  {kind:9s}  {row['step_ms']:7.3f}  {pace}", flush=True)
    described = {
        "benchmark": "requests under a grammar",
        "machine": machine(),
        "model": model,
        "batch": batch,
        "prompt_len": PROMPT_LEN,
        "repeats": REPEATS,
        "rows": rows,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(described, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="qwen3-0.6b", help="a folder of benchmarks/models")
    parser.add_argument("--batch", type=int, default=32)
    given = parser.parse_args()
    main(given.file, given.model, given.batch)
