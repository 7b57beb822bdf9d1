"""What prompts cost the host, by part: cached but for their last 16 tokens, and new ones; on a GPU the first
token of the former.

python -m ostinato.bench.prefix_host benchmarks/results/prefix-host-hits-cpu.json --repeats 60
python -m ostinato.bench.prefix_host benchmarks/results/prefix-host-h200.json --model qwen3-0.6b

Cached: microseconds from the call of `TextEngine.add` with token ids, in a list or something else, to the
launch, and for its delivery. New: the same from the call of `generate`, with a cache that is full of other
prompts. CPU time of the thread; the model itself is not run. First token (GPU only): milliseconds of
`generate` with one token, everything run. Cached prompts differ in their last 16 tokens. Of the repeats the
fastest of each part, which other processes disturb least; of first tokens the median.
"""

import argparse
import array
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from ostinato import LLM, SamplingParams
from ostinato.engine.stepping.step_inputs import inputs_of

from ..tools.machine import machine
from ..tools.results import write_json
from .repository import MODELS

LENGTHS = (1024, 8192, 32768)
NEW = 16
LAUNCHED, ARRIVED = "launched", "arrived"
REPEATS = 30
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 40960,
}
FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": lambda ids: ids,
    "array": lambda ids: array.array("i", ids),
    "numpy": np.array,
    "tensor": torch.tensor,
}
FRESH = ((1, 16384), (32, 512))
"""Prompts that are new, and how long each is."""
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def prompt_of(length: int, number: int, vocab: int) -> list[int]:
    """Random ids; those of one length begin alike."""
    draw = random.Random(length)
    shared = [draw.randrange(vocab) for _ in range(length - NEW)]
    draw = random.Random(f"{length} {number}")
    return shared + [draw.randrange(vocab) for _ in range(NEW)]


@contextmanager
def clocked(llm: LLM) -> Iterator[dict[str, float]]:
    """Seconds spent in the parts of the host's work, from now on."""
    engine = llm.engine
    core = engine.core
    parts = {
        "add": (engine, "add"),
        "schedule": (core.scheduler, "schedule"),
        "page table": (core.runner, "update_pages"),
        "sampling rows": (core.sampler, "join"),
        "send": (core.runner.rows, "send"),
        "inputs": (core.runner, "run"),
        "read": (core, "_read"),
        "complete": (core.scheduler, "complete"),
        "deliver": (engine._delivery, "take_in"),
    }
    spent: dict[str, float] = defaultdict(float)

    def timed(part: str, function: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **named)
            finally:
                ended = time.thread_time()
                spent[part] += ended - began
                if part == "inputs":
                    spent[LAUNCHED] = ended
                if part == "read":
                    spent[ARRIVED] = ended

        return call

    with mock.patch.multiple(engine, add=timed("add", engine.add)):
        patches = [
            mock.patch.object(owner, name, timed(part, getattr(owner, name)))
            for part, (owner, name) in parts.items()
            if part != "add"
        ]
        for patch in patches:
            patch.start()
        try:
            yield spent
        finally:
            for patch in patches:
                patch.stop()


@contextmanager
def without_model(llm: LLM) -> Iterator[None]:
    """Steps make their inputs, and no more; what they leave in the prefix cache is forgotten at the end."""
    runner = llm.engine.core.runner

    def run(step: Any) -> torch.Tensor:
        inputs_of(step)
        runner.has_sampled = False
        return runner.logits[: step.num_requests]

    with mock.patch.object(runner, "run", run):
        yield
    llm.engine.core.scheduler.flush_prefix_cache()


def clocked_call(call: Callable[[], object], spent: dict[str, float]) -> dict[str, float]:
    """Microseconds by part; up to the launch, from there to the tokens, while a GPU is at work, and behind
    them."""
    spent.clear()
    began = time.thread_time()
    call()
    ended, launched, arrived = time.thread_time(), spent.pop(LAUNCHED), spent.pop(ARRIVED)
    found = {**spent, "to launch": launched - began, "to tokens": arrived - launched}
    found["behind them"] = ended - arrived
    return {part: seconds * 1e6 for part, seconds in found.items()}


def fastest(repeats: list[dict[str, float]]) -> dict[str, float]:
    """Of each part."""
    return {part: min(each[part] for each in repeats) for part in repeats[0]}


def host_row(llm: LLM, length: int, form: str, repeats: int) -> dict[str, Any]:
    """Of a prompt that is cached but for its end."""
    vocab, found = llm.engine.core.loaded.model.config.vocab_size, []

    def serve(ids: Any, is_cached: bool) -> None:
        output = llm.engine.add({"prompt_token_ids": ids}, ONE)
        while not output.finished:
            llm.engine.step()
        assert not is_cached or output.num_cached_tokens == length - NEW

    with without_model(llm), clocked(llm) as spent:
        for number in range(repeats + 2):
            ids = FORMS[form](prompt_of(length, number, vocab))
            found.append(clocked_call(lambda: serve(ids, number > 0), spent))  # noqa: B023
    return {"tokens": length, "given": form, "us": fastest(found[2:])}


def fresh_row(llm: LLM, count: int, length: int, repeats: int) -> dict[str, Any]:
    """Of prompts that nobody has seen, when the cache is full of others."""
    vocab, pages = llm.engine.core.loaded.model.config.vocab_size, llm.engine.core.scheduler.pages
    num_before = -(-pages.num_usable // pages.pages_for(count * length))
    found = []
    with without_model(llm), clocked(llm) as spent:
        for number in range(num_before + repeats):
            draw = random.Random(f"{count} {length} {number}")
            prompts = [[draw.randrange(vocab) for _ in range(length)] for _ in range(count)]
            found.append(
                clocked_call(lambda: llm.generate(prompts, ONE, use_tqdm=False), spent)  # noqa: B023
            )
    return {"prompts": count, "tokens": length, "us": fastest(found[num_before:])}


def first_token(llm: LLM, length: int, repeats: int) -> float:
    """Milliseconds to the first token of a prompt that is cached but for its end."""
    vocab = llm.engine.core.loaded.model.config.vocab_size
    seconds = []
    for number in range(repeats + 2):
        prompt = {"prompt_token_ids": prompt_of(length, number, vocab)}
        began = time.perf_counter()
        [output] = llm.generate([prompt], ONE, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
        assert number == 0 or output.num_cached_tokens == length - NEW
    return statistics.median(seconds[2:]) * 1e3


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", help="a directory of benchmarks/models; default: a tiny one")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    asked = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as tiny:
        (Path(tiny) / "config.json").write_text(json.dumps(TINY))
        options = {
            "load_format": "dummy",
            "max_model_len": max(asked.lengths) + NEW,
            "max_running_requests": 32,
            "chunked_prefill_size": max(count * length for count, length in FRESH),
        }
        if not on_gpu:
            options |= {"cuda_graph_mode": "none", "num_pages": 4 * max(asked.lengths) // 16}
        with LLM(str(MODELS / asked.model) if asked.model else tiny, **options) as llm:
            cached = [
                host_row(llm, length, form, asked.repeats) for length in asked.lengths for form in FORMS
            ]
            fresh = [] if on_gpu else [fresh_row(llm, *each, asked.repeats) for each in FRESH]
            if on_gpu:
                for row in cached:
                    if row["given"] == "list":
                        row["first_token_ms"] = first_token(llm, row["tokens"], asked.repeats)
    for row in cached + fresh:
        parts = ", ".join(f"{part} {value:.0f}" for part, value in row["us"].items())
        print(
            f"{row.get('given', row.get('prompts'))} {row['tokens']}: {parts}", row.get("first_token_ms", "")
        )
    settings = {"model": asked.model or "tiny", "new_tokens": NEW, "repeats": asked.repeats}
    result = {"machine": machine(), "settings": settings, "cached": cached, "fresh": fresh}
    write_json(result, asked.file)


if __name__ == "__main__":
    main()
