"""What a prompt costs the host, by part, that is cached but for its last 16 tokens; on a GPU its first token.

python benchmarks/prefix_host.py benchmarks/results/prefix-host-cpu.json
python benchmarks/prefix_host.py benchmarks/results/prefix-host-h200.json --model qwen3-0.6b

Host: microseconds from the call of `TextEngine.add` with a list of token ids to the launch, and for its
delivery; the model itself is not run. First token (GPU only): milliseconds of `generate` with one token,
everything run. The prompts differ in their last 16 tokens. Of the repeats the fastest of each part, which
other processes disturb least; of first tokens the median.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ostinato import LLM, SamplingParams
from ostinato.engine.stepping.model_runner import inputs_of
from ostinato.tools.machine import machine

MODELS = Path(__file__).parent / "models"
LENGTHS = (1024, 8192, 32768)
NEW = 16
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
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def prompt_of(length: int, number: int, vocab: int) -> dict[str, list[int]]:
    """Random ids; those of one length begin alike."""
    draw = random.Random(length)
    shared = [draw.randrange(vocab) for _ in range(length - NEW)]
    draw = random.Random(f"{length} {number}")
    return {"prompt_token_ids": shared + [draw.randrange(vocab) for _ in range(NEW)]}


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
        "complete": (core.scheduler, "complete"),
        "deliver": (engine._delivery, "take_in"),
    }
    spent: dict[str, float] = defaultdict(float)

    def timed(part: str, function: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **named)
            finally:
                spent[part] += time.perf_counter() - began

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


def host_row(llm: LLM, length: int, repeats: int) -> dict[str, Any]:
    """Microseconds by part."""
    runner, vocab = llm.engine.core.runner, llm.engine.core.loaded.model.config.vocab_size
    found: dict[str, list[float]] = defaultdict(list)

    def without_model(step: Any) -> torch.Tensor:
        inputs_of(step)
        runner.has_sampled = False
        return runner.logits[: step.num_requests]

    with mock.patch.object(runner, "run", without_model), clocked(llm) as spent:
        for number in range(repeats + 2):
            prompt = prompt_of(length, number, vocab)
            spent.clear()
            output = llm.engine.add(prompt, ONE)
            while not output.finished:
                llm.engine.step()
            assert number == 0 or output.num_cached_tokens == length - NEW
            if number > 1:
                for part, seconds in spent.items():
                    found[part].append(seconds * 1e6)
    llm.engine.core.scheduler.flush_prefix_cache()  # what was cached was never computed
    fastest = {part: min(each) for part, each in found.items()}
    return {"tokens": length, "us": fastest, "sum_us": sum(fastest.values())}


def first_token(llm: LLM, length: int, repeats: int) -> float:
    """Milliseconds to the first token of a prompt that is cached but for its end."""
    vocab = llm.engine.core.loaded.model.config.vocab_size
    seconds = []
    for number in range(repeats + 2):
        prompt = prompt_of(length, number, vocab)
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
            "max_running_requests": 8,
        }
        if not on_gpu:
            options |= {"cuda_graph_mode": "none", "num_pages": 4 * max(asked.lengths) // 16}
        with LLM(str(MODELS / asked.model) if asked.model else tiny, **options) as llm:
            rows = [host_row(llm, length, asked.repeats) for length in asked.lengths]
            if on_gpu:
                for row in rows:
                    row["first_token_ms"] = first_token(llm, row["tokens"], asked.repeats)
    for row in rows:
        parts = ", ".join(f"{part} {value:.0f}" for part, value in row["us"].items())
        print(f"{row['tokens']}: {parts}; {row['sum_us']:.0f} us; {row.get('first_token_ms')} ms")
    settings = {"model": asked.model or "tiny", "new_tokens": NEW, "repeats": asked.repeats}
    asked.file.write_text(
        json.dumps({"machine": machine(), "settings": settings, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
