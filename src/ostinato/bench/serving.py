"""`ostinato bench serving`: open-loop load on any OpenAI-compatible server.

Requests arrive by a Poisson process, whether or not earlier ones are done: a server that falls behind shows
it in its latencies instead of slowing down its clients.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ostinato.graphs.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from ..tools.openai_stream import StreamedRequest
    from ..tools.streaming_client import StreamingClient

WORDS = (
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
)


@dataclass(frozen=True)
class ServingLoad:
    """What is sent, when, and what counts for goodput. Each field is a flag; its docstring is the help."""

    base_url: str = "http://127.0.0.1:8000"
    """Address of the server, without /v1."""
    model: str | None = None
    """The model's name; default: the first that /v1/models lists."""
    api_key: str | None = None
    """API key, sent as a bearer token."""
    endpoint: str = "completions"
    """Endpoint to use: completions or chat."""
    num_requests: int = 200
    """Total number of requests."""
    request_rate: float = 4.0
    """Requests per second on average; 0 sends all at once."""
    max_concurrency: int | None = None
    """Maximum number of requests at the same time; with it the load is no longer open-loop."""
    input_len: int | None = None
    """Prompt length in words (or token ids); default: random, distributed as in ShareGPT conversations."""
    output_len: int | None = None
    """Output length in tokens; default: random, likewise."""
    max_len: int = 1024
    """Upper limit of random prompt and output lengths."""
    long_share: float = 0.0
    """Fraction of requests with a long prompt."""
    long_len: int = 8192
    """Length of a long prompt."""
    token_ids: int | None = None
    """Send random token ids below this number instead of words; completions only."""
    ignore_eos: bool = True
    """Ask for exactly the output length, with a field of vLLM, SGLang and Ostinato that other servers may
    refuse."""
    temperature: float = 0.0
    """Temperature of every request."""
    seed: int = 0
    """Seed for arrivals, lengths and prompts."""
    slo_ttft_ms: float = 500.0
    """Maximum time to first token, in milliseconds, of a request that counts for goodput."""
    slo_tpot_ms: float = 50.0
    """Maximum time per token after the first, in milliseconds, of a request that counts for goodput."""
    warmups: int = 2
    """Number of requests before the measurement starts."""

    def __post_init__(self) -> None:
        if self.endpoint not in ("completions", "chat"):
            raise ConfigError(f"unknown endpoint {self.endpoint!r}: use completions or chat")
        if self.token_ids is not None and self.endpoint == "chat":
            raise ConfigError("token ids can be sent to completions only, not to chat")
        if not 0 <= self.long_share <= 1:
            raise ConfigError(f"long_share must be from 0 to 1, not {self.long_share}")
        for name in ("num_requests", "max_len", "long_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def path(self) -> str:
        """Path of requests, after the base URL."""
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"


@dataclass(frozen=True)
class PlannedRequest:
    """A request of the plan."""

    at: float
    """Seconds after the start."""
    body: dict[str, Any]


def plan(load: ServingLoad, model: str) -> list[PlannedRequest]:
    """All requests of a load; the same load gives the same plan."""
    draw = random.Random(load.seed)
    at, planned = 0.0, []
    for _ in range(load.num_requests):
        planned.append(PlannedRequest(at, _body(load, model, draw)))
        if load.request_rate > 0:
            at += draw.expovariate(load.request_rate)
    return planned


def _body(load: ServingLoad, model: str, draw: random.Random) -> dict[str, Any]:
    # Log-normal, with medians and tails like those of ShareGPT's conversations.
    prompt_len = load.input_len or _drawn(draw, 90, 1.2, load.max_len)
    if load.long_share > 0 and draw.random() < load.long_share:
        prompt_len = load.long_len
    output_len = load.output_len or _drawn(draw, 150, 0.9, load.max_len)
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": output_len,
        "temperature": load.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.ignore_eos:
        body["ignore_eos"] = True
    if load.token_ids is not None:
        return {**body, "prompt": [draw.randrange(load.token_ids) for _ in range(prompt_len)]}
    text = " ".join(draw.choice(WORDS) for _ in range(prompt_len))
    if load.endpoint == "chat":
        return {**body, "messages": [{"role": "user", "content": text}]}
    return {**body, "prompt": text}


def _drawn(draw: random.Random, median: float, spread: float, longest: int) -> int:
    return max(4, min(longest, round(draw.lognormvariate(math.log(median), spread))))


def send_load(load: ServingLoad) -> dict[str, Any]:
    """Send the load and return the results, ready for JSON."""
    # A garbage collection that walks through all of torch would count as the server's time.
    gc.collect()
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_send_load(load))
    finally:
        gc.unfreeze()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The fastest event loop available, because the client's cost counts as the server's."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _send_load(load: ServingLoad) -> dict[str, Any]:
    from ..tools.openai_stream import stream
    from ..tools.streaming_client import ConnectionBroken, StreamingClient

    try:
        client = StreamingClient(
            load.base_url, {"Authorization": f"Bearer {load.api_key}"} if load.api_key else None
        )
        model = load.model or await _first_model(client, load)
    except ConnectionBroken as error:
        raise ConfigError(str(error)) from error
    planned = plan(load, model)
    bodies = [json.dumps(request.body).encode() for request in planned]
    for body in bodies[: load.warmups]:
        done = await stream(client, load.path, body, perf_counter())
        if done.error is not None:
            raise ConfigError(f"{load.base_url} does not serve the load: {done.error}")
    slots = asyncio.Semaphore(load.max_concurrency or len(planned))
    start = perf_counter()

    async def send(request: PlannedRequest, body: bytes) -> StreamedRequest:
        await asyncio.sleep(max(0.0, start + request.at - perf_counter()))
        if load.max_concurrency is None:
            return await stream(client, load.path, body, start + request.at)
        async with slots:
            return await stream(client, load.path, body, perf_counter())

    results = await asyncio.gather(*map(send, planned, bodies))
    client.close()
    return summary(load, model, results)


async def _first_model(client: StreamingClient, load: ServingLoad) -> str:
    status, body = await client.get("/v1/models")
    try:
        name: str = json.loads(body)["data"][0]["id"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        said = f"HTTP {status}: {body[:100].decode(errors='replace')}"
        raise ConfigError(f"{load.base_url}/v1/models lists no model ({said}): set --model") from error
    return name


def summary(load: ServingLoad, model: str, results: Sequence[StreamedRequest]) -> dict[str, Any]:
    """Latencies, throughput and goodput of finished requests."""
    good = [result for result in results if result.error is None]
    seconds = max(result.ended for result in results) - min(result.started for result in results)
    tpots = [result.tpot for result in good if result.tpot is not None]
    met = [result for result in good if _meets(load, result)]
    errors = [result.error for result in results if result.error is not None]
    return {
        "load": {**asdict(load), "model": model, "api_key": None},
        "seconds": seconds,
        "finished": len(good),
        "failed": len(errors),
        "errors": sorted(set(errors))[:5],
        "prompt_tokens": sum(result.prompt_tokens for result in good),
        "output_tokens": sum(result.output_tokens for result in good),
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": sum(result.output_tokens for result in good) / seconds,
        "goodput_requests_per_second": len(met) / seconds,
        "goodput_share": len(met) / len(results),
        "ttft_ms": percentiles([result.ttft for result in good]),
        "tpot_ms": percentiles(tpots),
        "itl_ms": percentiles([gap for result in good for gap in result.gaps]),
        "latency_ms": percentiles([result.latency for result in good]),
        **_by_length(load, good),
        "requests": [
            {
                "at": result.started - min(other.started for other in results),
                "ttft_ms": result.ttft * 1e3,
                "tpot_ms": None if result.tpot is None else result.tpot * 1e3,
                "latency_ms": result.latency * 1e3,
                "prompt_tokens": result.prompt_tokens,
                "output_tokens": result.output_tokens,
            }
            for result in good
        ],
    }


def _by_length(load: ServingLoad, good: Sequence[StreamedRequest]) -> dict[str, Any]:
    """For a load in which some prompts are long: the latencies of both kinds."""
    if load.long_share == 0:
        return {}
    kinds = {
        "long": [result for result in good if result.prompt_tokens >= load.long_len],
        "others": [result for result in good if result.prompt_tokens < load.long_len],
    }
    return {
        name: {
            "requests": len(kind),
            "ttft_ms": percentiles([result.ttft for result in kind]),
            "tpot_ms": percentiles([result.tpot for result in kind if result.tpot is not None]),
            "itl_ms": percentiles([gap for result in kind for gap in result.gaps]),
        }
        for name, kind in kinds.items()
    }


def _meets(load: ServingLoad, result: StreamedRequest) -> bool:
    within = result.ttft * 1e3 <= load.slo_ttft_ms
    return within and (result.tpot is None or result.tpot * 1e3 <= load.slo_tpot_ms)


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50, p95, p99 and maximum in milliseconds; None for an empty sequence."""
    if not seconds:
        return None
    ordered = sorted(seconds)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        return (low + (high - low) * (place - math.floor(place))) * 1e3

    mean = sum(ordered) / len(ordered) * 1e3
    return {"mean": mean, "p50": at(0.5), "p95": at(0.95), "p99": at(0.99), "max": at(1.0)}


def as_table(result: dict[str, Any]) -> Table:
    """The result as a table."""
    from rich.table import Table

    load = result["load"]
    rate = f"{load['request_rate']:g} requests/s" if load["request_rate"] > 0 else "all at once"
    table = Table(title=f"{load['model']} at {load['base_url']}, {rate}", title_justify="left")
    table.add_column("milliseconds")
    for heading in ("mean", "p50", "p95", "p99", "max"):
        table.add_column(heading, justify="right")
    names = {
        "ttft_ms": "time to first token",
        "tpot_ms": "time per output token",
        "itl_ms": "between pieces",
        "latency_ms": "whole request",
    }
    for key, name in names.items():
        found = result[key]
        cells = ["-"] * 5 if found is None else [f"{value:,.1f}" for value in found.values()]
        table.add_row(name, *cells)
    table.caption = (
        f"{result['finished']} finished, {result['failed']} failed in {result['seconds']:.1f} s: "
        f"{result['requests_per_second']:.2f} requests/s, {result['output_tokens_per_second']:,.0f} output "
        f"tokens/s; goodput {result['goodput_requests_per_second']:.2f} requests/s "
        f"({result['goodput_share']:.0%} within {load['slo_ttft_ms']:g} ms to the first token and "
        f"{load['slo_tpot_ms']:g} ms per token)"
    )
    return table


def write_plot(result: dict[str, Any], file: Path) -> None:
    """Latencies over time and as distributions, as a PNG."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "a plot needs matplotlib: pip install -e '.[bench]' in Ostinato's folder"
        ) from error
    figure = Figure(figsize=(11, 4), layout="constrained")
    over_time, distribution = figure.subplots(1, 2)
    requests = result["requests"]
    limits = {"ttft_ms": result["load"]["slo_ttft_ms"], "tpot_ms": result["load"]["slo_tpot_ms"]}
    for key, name in (("ttft_ms", "time to first token"), ("tpot_ms", "time per output token")):
        known = [(request["at"], request[key]) for request in requests if request[key] is not None]
        if not known:
            continue
        times, values = zip(*known, strict=True)
        [dots] = over_time.plot(times, values, ".", markersize=4, label=name)
        over_time.axhline(limits[key], color=dots.get_color(), linewidth=0.8, linestyle="--")
        shares = [(place + 1) / len(values) for place in range(len(values))]
        distribution.step(sorted(values), shares, where="post", label=name)
    over_time.set(xlabel="arrival (s)", ylabel="ms", yscale="log", title="Requests (dashed: objective)")
    distribution.set(xlabel="ms", ylabel="share of requests", xscale="log", title="Distribution")
    for axes in (over_time, distribution):
        axes.grid(alpha=0.3)
        axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
