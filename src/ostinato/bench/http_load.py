"""`ostinato bench http`: the cost of HTTP. The same requests through `LLM.generate` and through a server.

Both run in their own processes, one after the other, with the same engine options; they share only the
machine. The load is closed-loop: a number of streams at a time, each followed by the next.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any
from urllib.request import urlopen

from ..tools.results import BenchError, head, make_table
from .made_up_tokenizer import with_text
from .serving import ServingLoad, plan, send_load
from .subject import Subject


@dataclass(frozen=True)
class HttpLoad:
    """The requests to send. Each field is a flag; its docstring is the help."""

    streams: int = 64
    """Number of requests at a time."""
    num_requests: int = 256
    """Total number of requests."""
    input_len: int = 128
    """Tokens per prompt."""
    output_len: int = 256
    """Output tokens per request."""
    repeats: int = 3
    """Number of measurements; the median is reported."""

    def serving(self, vocab_size: int, seed: int) -> ServingLoad:
        """The same as a load on a server; another seed gives other prompts, which no prefix cache has."""
        return ServingLoad(
            num_requests=self.num_requests,
            request_rate=0,
            max_concurrency=self.streams,
            input_len=self.input_len,
            output_len=self.output_len,
            token_ids=vocab_size,
            seed=seed,
        )


def bench_http(subject: Subject, load: HttpLoad) -> dict[str, Any]:
    """Tokens per second offline and served, and the fraction that HTTP costs."""
    vocab = subject.shape.vocab_size
    with with_text(subject) as (speaking, tokenizer):
        options = {"max_running_requests": load.streams, **speaking.options}
        loads = [load.serving(vocab, seed) for seed in range(load.repeats + 1)]
        offline, offline_steps = _offline(options, loads)
        served, served_steps = _served(options, loads)
    result = head("http", model=subject.name, tokenizer=tokenizer, load=vars(load))
    by_hand, by_http = (
        statistics.median(offline),
        statistics.median(run["tokens_per_second"] for run in served),
    )
    return {
        **result,
        "offline_tokens_per_second": offline,
        "offline_steps": offline_steps,
        "served": served,
        "served_steps": served_steps,
        "median_offline_tokens_per_second": by_hand,
        "median_served_tokens_per_second": by_http,
        "overhead_share": 1 - by_http / by_hand,
    }


def as_tables(result: Mapping[str, Any]) -> Any:
    """The result as a table."""
    load = result["settings"]["load"]
    title = f"{result['settings']['model']}, {load['streams']} streams of {load['output_len']} tokens"
    rows = [
        ("LLM.generate", f"{result['median_offline_tokens_per_second']:,.0f}", ""),
        ("server", f"{result['median_served_tokens_per_second']:,.0f}", f"{result['overhead_share']:.1%}"),
    ]
    return make_table(title, ("", "tokens/s", "overhead"), rows)


def _steps(report: Mapping[str, Any]) -> dict[str, float]:
    """Steps that the engine ran in all loads, including the first, by kind, and rows per decode step."""
    graphs = report["graphs"]
    decode = [graph for graph in graphs if graph["descriptor"].startswith("decode")]
    steps = sum(graph["replays"] for graph in decode)
    rows = sum(graph["replays"] * graph["num_tokens"] * (1 - graph["padding_waste"]) for graph in decode)
    return {
        "decode": steps,
        "mixed": sum(graph["replays"] for graph in graphs) - steps,
        "eager": sum(report["eager_steps"].values()),
        "rows_per_decode_step": rows / steps if steps else 0.0,
    }


def _offline(options: Mapping[str, Any], loads: list[ServingLoad]) -> tuple[list[float], dict[str, float]]:
    context = multiprocessing.get_context("spawn")
    results: Any = context.SimpleQueue()
    process = context.Process(target=_generate, args=(dict(options), loads, results))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise BenchError(f"the offline engine ended with exit code {process.exitcode}: see its message above")
    found: tuple[list[float], dict[str, float]] = results.get()
    return found


def _generate(options: dict[str, Any], loads: list[ServingLoad], results: Any) -> None:
    """Runs in its own process: the first load warms up, the others are measured."""
    from ostinato.engine.llm import LLM
    from ostinato.engine.parameters.sampling_params import SamplingParams

    llm = LLM(options.pop("model", None), progress=False, **options)
    measured = []
    for load in loads:
        params = SamplingParams(temperature=0.0, max_tokens=load.output_len, ignore_eos=True)
        prompts = [{"prompt_token_ids": request.body["prompt"]} for request in plan(load, "")]
        began = perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = perf_counter() - began
        failed = [output.error for output in outputs if output.error is not None]
        if failed:
            raise BenchError(f"{len(failed)} requests failed: {failed[0]}")
        measured.append(sum(len(output.outputs[0].token_ids) for output in outputs) / seconds)
    results.put((measured[1:], _steps(json.loads(llm.graph_report().json()))))


def _served(
    options: Mapping[str, Any], loads: list[ServingLoad]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    measured = []
    with running_server(options) as url:
        for load in loads:
            result = send_load(replace(load, base_url=url, warmups=1))
            if result["failed"]:
                raise BenchError(f"{result['failed']} requests failed: {result['errors'][0]}")
            measured.append(
                {
                    "tokens_per_second": result["output_tokens_per_second"],
                    **{key: result[key] for key in ("ttft_ms", "tpot_ms", "itl_ms")},
                }
            )
        with urlopen(f"{url}/graphs") as answer:
            steps = _steps(json.load(answer)["forward"])
    return measured[1:], steps


@contextmanager
def running_server(options: Mapping[str, Any]) -> Iterator[str]:
    """Run a server with these engine options; yields its address."""
    command = [sys.executable, "-m", "ostinato", "serve", "--port", "0", *_flags(options)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = ""
        for line in process.stderr:
            said += line
            if found := re.search(r"ready: .* on (http://\S+)", line):
                yield found[1]
                return
        raise BenchError(f"the server did not start:\n{said}")
    finally:
        process.terminate()
        process.communicate(timeout=60)


def _flags(options: Mapping[str, Any]) -> list[str]:
    flags = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags += [f"--{flag}", _written(value)]
    return flags


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
