"""Inter-token latency of running streams while prompts arrive, and how many tokens a second come of it.

ostinato bench latency-under-prompts benchmarks/results/latency-under-prompts-h200.json
ostinato bench latency-under-prompts FILE --model llama-3.1-8b --rate 1 --options '{"steps_ahead": 0}'

A number of streams decode without end. Beside them prompts arrive in groups, as from a client that fans out,
at random moments (always the same draw), each with a short answer. Latencies are those of the streams alone:
the time between two of their tokens, on the host, at the engine's output. A row is added to the file for each
call, so that states of the code or options can be compared.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from ostinato import LLM, SamplingParams

from ..tools.machine import machine
from ..tools.results import write_json
from .repository import MODELS

STREAMS, STREAM_PROMPT = 32, 512
GROUP = (1, 8)
PROMPT_TOKENS = (1024, 6144)
ANSWER_TOKENS = 32
SECONDS = 8.0


def arrivals(rate: float, vocab: int, seconds: float) -> list[tuple[float, list[int]]]:
    """(second, prompt): groups come at random moments, the first at once, `rate` a second on average."""
    draw, at, found = random.Random(1), 0.0, []
    while at < seconds:
        for _ in range(draw.randint(*GROUP)):
            length = draw.randint(*PROMPT_TOKENS)
            found.append((at, draw.choices(range(vocab), k=length)))
        at += draw.expovariate(rate)
    return found


def percentile(values: list[float], share: float) -> float:
    """The value that this share of all is at most."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measured(llm: LLM, rate: float, seconds: float) -> dict[str, Any]:
    """Serve the arrivals beside the streams; milliseconds and rates."""
    engine = llm.engine
    vocab = engine.core.loaded.model.config.vocab_size
    draw = random.Random(0)
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    short = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    streams = [
        engine.add({"prompt_token_ids": draw.choices(range(vocab), k=STREAM_PROMPT)}, endless)
        for _ in range(STREAMS)
    ]
    while any(len(stream.outputs[0].token_ids) < 8 for stream in streams):
        engine.step()
    is_stream = {id(stream) for stream in streams}
    waiting = arrivals(rate, vocab, seconds)
    arrived: dict[int, float] = {}
    first_tokens, tokens = list[float](), 0
    gaps, last = list[float](), dict.fromkeys(is_stream, time.perf_counter())
    began, at = time.perf_counter(), 0
    answered, first_seen = 0, set[int]()
    keep: list[Any] = []  # ids must not be used again
    while (now := time.perf_counter() - began) < seconds or answered < at:
        while at < len(waiting) and waiting[at][0] <= now:
            output = engine.add({"prompt_token_ids": waiting[at][1]}, short)
            keep.append(output)
            arrived[id(output)] = began + waiting[at][0]
            at += 1
        changed = engine.step()
        done = time.perf_counter()
        for output in changed:
            name = id(output)
            tokens += 1
            if name in is_stream:
                gaps.append(done - last[name])
                last[name] = done
                assert not output.finished, "give the streams a longer context"
                continue
            if name not in first_seen:
                first_seen.add(name)
                first_tokens.append(done - arrived[name])
            answered += output.finished
    taken = time.perf_counter() - began
    for stream in streams:
        engine.abort(stream.request_id)
    while engine.has_work:
        engine.step()
    milliseconds = [gap * 1e3 for gap in gaps]
    return {
        "inter_token_ms": {
            "p50": statistics.median(milliseconds),
            "p95": percentile(milliseconds, 0.95),
            "p99": percentile(milliseconds, 0.99),
            "max": max(milliseconds),
        },
        "first_token_ms": {
            "p50": statistics.median(first_tokens) * 1e3,
            "p99": percentile(first_tokens, 0.99) * 1e3,
        },
        "output_tokens_per_s": tokens / taken,
        "prompt_tokens_per_s": sum(len(ids) for _, ids in waiting[:at]) / taken,
        "prompts": at,
        "seconds": taken,
    }


def main(file: Path, model: str, rate: float, options: dict[str, Any], label: str) -> None:
    """Measure, print and add a row."""
    started = {"max_model_len": 32768, "enable_prefix_caching": False} | options
    with LLM(str(MODELS / model), load_format="dummy", **started) as llm:
        measured(llm, rate, SECONDS / 4)
        found = measured(llm, rate, SECONDS)
    row = {"label": label, "model": model, "groups_per_s": rate, "options": options} | found
    result: dict[str, Any] = (
        json.loads(file.read_text()) if file.exists() else {"benchmark": "latency under prompts"}
    )
    result["machine"] = machine()
    result.setdefault("rows", []).append(row)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(result, file)
    gaps, firsts = found["inter_token_ms"], found["first_token_ms"]
    print(
        f"{label or 'as it is':24s} {model:14s} inter-token ms p50 {gaps['p50']:.2f} p95 {gaps['p95']:.1f} "
        f"p99 {gaps['p99']:.1f} max {gaps['max']:.1f}; first token p50 {firsts['p50']:.0f} p99 "
        f"{firsts['p99']:.0f}; {found['output_tokens_per_s']:,.0f} tokens/s out, "
        f"{found['prompt_tokens_per_s']:,.0f} in",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="where the row goes")
    parser.add_argument("--model", default="qwen3-0.6b", help="a folder of benchmarks/models")
    parser.add_argument("--rate", type=float, default=6.0, help="groups of prompts a second")
    parser.add_argument("--options", type=json.loads, default={}, help="keywords of LLM, as JSON")
    parser.add_argument("--label", default="", help="what the row is called")
    given = parser.parse_args()
    main(given.file, given.model, given.rate, given.options, given.label)
