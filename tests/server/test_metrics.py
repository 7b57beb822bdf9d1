"""What Prometheus, the page and `/graphs` are told."""

import json
import re
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ostinato.server.config import ServerConfig
from ostinato.server.metrics.exposition import ServerCollector
from ostinato.server.metrics.histogram import Histogram
from ostinato.server.service import Service

from .server_process import ServerProcess

DASHBOARD = Path(__file__).parents[2] / "dashboards" / "ostinato.json"
BODY = {"prompt": "metrics a", "max_tokens": 10, "temperature": 0}


def samples(server: ServerProcess) -> dict[str, float]:
    """Sums over all labels, by the name of the series."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(server.metrics()):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def samples_at_rest(server: ServerProcess, steps: float) -> dict[str, float]:
    """Once so many steps are told of and nothing runs: statistics of the engine come twice a second."""
    end = time.monotonic() + 20
    while True:
        found = samples(server)
        if found["ostinato:steps_total"] >= steps and not found["ostinato:num_requests_running"]:
            return found
        assert time.monotonic() < end, found
        time.sleep(0.05)


def test_metrics_move_with_requests(server: ServerProcess) -> None:
    server.wait_until_idle()
    before = samples(server)
    for _ in range(3):
        assert server.post("/v1/completions", BODY).status_code == 200
    after = samples_at_rest(server, before.get("ostinato:steps_total", 0.0) + 30)

    def grew(name: str) -> float:
        return after[f"ostinato:{name}"] - before.get(f"ostinato:{name}", 0.0)

    assert grew("generation_tokens_total") == 30
    assert grew("prompt_tokens_total") == 27
    assert grew("request_success_total") == 3
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert grew(f"{name}_count") == 3
        assert grew(f"{name}_sum") > 0
    assert grew("inter_token_latency_seconds_count") == 27
    assert grew("request_time_per_output_token_seconds_count") == 3
    assert grew("iteration_tokens_total_count") >= 28
    assert grew("iteration_tokens_total_sum") == 57
    for name in ("queue", "prefill", "decode", "inference"):
        assert grew(f"request_{name}_time_seconds_count") == 3
    assert grew("request_decode_time_seconds_sum") > 0
    assert grew("request_prefill_time_seconds_sum") > 0
    whole = grew("time_to_first_token_seconds_sum")
    parts = grew("request_queue_time_seconds_sum") + grew("request_prefill_time_seconds_sum")
    assert parts == pytest.approx(whole)
    assert grew("steps_total") >= 30
    assert grew("graph_replays_total") > 0
    assert grew("graph_rows_total") >= grew("graph_padded_rows_total") > 0
    assert grew("step_cpu_microseconds_total") > 0
    assert grew("http_answers_total") >= 3
    assert 0 <= after["ostinato:device_idle_share"] <= 1
    assert after["ostinato:graph_memory_bytes"] > 0
    assert after["ostinato:graph_capture_seconds"] > 0
    assert after["ostinato:num_requests_running"] == 0
    assert after["ostinato:kv_cache_usage_perc"] == 0
    assert after["ostinato:engine_up"] == 1


def test_replays_have_their_mode_and_rung(server: ServerProcess) -> None:
    server.post("/v1/completions", BODY)
    text = server.metrics()
    assert re.search(r'graph_replays_total\{kind="decode",mode="full",model_name="scripted",rung="4"\}', text)
    assert re.search(r'eager_steps_total\{.*reason="', text) or "eager_steps" in text


def test_every_metric_of_the_dashboard_exists(server: ServerProcess) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(expressions) >= 10
    offered = samples(server).keys() | set(re.findall(r"# TYPE (\S+)", server.metrics()))
    for name in {name for text in expressions for name in re.findall(r"ostinato:\w+", text)}:
        assert name in offered or name.removesuffix("_total") in offered, name


VLLM = """e2e_request_latency_seconds_bucket e2e_request_latency_seconds_count e2e_request_latency_seconds_sum
generation_tokens_total inter_token_latency_seconds_bucket inter_token_latency_seconds_count
inter_token_latency_seconds_sum iteration_tokens_total_count kv_cache_usage_perc num_requests_running
num_requests_waiting prompt_tokens_total request_decode_time_seconds_sum request_generation_tokens_bucket
request_max_num_generation_tokens_sum request_prefill_time_seconds_sum request_prompt_tokens_bucket
request_queue_time_seconds_sum request_success_total time_to_first_token_seconds_bucket
time_to_first_token_seconds_count time_to_first_token_seconds_sum"""
"""What the dashboards ask for that vLLM publishes in examples/observability."""
SGLANG = """cache_hit_rate e2e_request_latency_seconds_bucket e2e_request_latency_seconds_count
e2e_request_latency_seconds_sum gen_throughput num_queue_reqs num_running_reqs token_usage
time_to_first_token_seconds_bucket time_to_first_token_seconds_count time_to_first_token_seconds_sum"""
"""Of the one in SGLang's examples/monitoring."""


def test_every_metric_of_the_peers_dashboards_exists(server: ServerProcess) -> None:
    server.post("/v1/completions", BODY)
    offered = samples(server)
    missing = [name for name in (VLLM + " " + SGLANG).split() if f"ostinato:{name}" not in offered]
    assert not missing


def test_time_in_the_queue_is_told_apart(server: ServerProcess) -> None:
    """Sixteen run at once; of those behind them, most of the time to the first token is waiting."""
    server.wait_until_idle()
    before = samples(server)
    answer = server.post("/v1/completions", {**BODY, "max_tokens": 40, "n": 64})
    assert answer.status_code == 200
    after = samples(server)
    queued, first = (
        after[f"ostinato:{name}_seconds_sum"] - before.get(f"ostinato:{name}_seconds_sum", 0.0)
        for name in ("request_queue_time", "time_to_first_token")
    )
    assert first / 2 < queued < first


def test_the_prefix_of_sglangs_dashboard() -> None:
    class Engine:
        statistics, restarts, state, progress = None, 0, "loading", ""

    service = Service(ServerConfig(metrics_prefix="sglang_"), Engine(), "m")  # type: ignore[arg-type]
    names = {metric.name for metric in ServerCollector(service).collect()}
    assert "sglang_time_to_first_token_seconds" in names
    assert "ostinato:engine_up" in names


def test_history_begins_with_the_server(server: ServerProcess) -> None:
    server.post("/v1/completions", {**BODY, "max_tokens": 100})
    time.sleep(1.1)
    history = server.get("/stats", params={"after": -1}).json()["history"]
    columns = dict(zip(history["names"], zip(*history["samples"], strict=True), strict=True))
    numbers = columns["number"]
    assert list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))
    assert max(columns["generation_tokens_per_second"]) > 0
    assert any(value is not None and value > 0 for value in columns["tpot_seconds"])
    later = server.get("/stats", params={"after": numbers[-1] - 1}).json()["history"]["samples"]
    assert 1 <= len(later) <= 3
    assert server.get("/stats").json()["history"] is None


def test_graphs(server: ServerProcess) -> None:
    server.post("/v1/completions", BODY)
    report = server.get("/graphs").json()
    assert report["forward"]["totals"]["replays"] > 0
    assert report["forward"]["mode"] == "full-and-piecewise"
    assert report["sampling"]["totals"]["graphs"] > 0
    assert report["memory"]["weights"] > 0


def test_stats(server: ServerProcess) -> None:
    server.post("/v1/completions", BODY)
    found = server.get("/stats").json()
    assert found["model"] == "scripted"
    assert found["ttft_seconds"]["p50"] <= found["ttft_seconds"]["p95"]
    assert {rung["kind"] for rung in found["engine"]["graphs"]} >= {"decode", "mixed", "sampling"}


def test_histogram() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0.5, 1, 1.5, 7):
        histogram.observe(value)
    assert histogram.cumulative == [("1.0", 2.0), ("2.0", 3.0), ("5.0", 3.0), ("+Inf", 4.0)]
    assert histogram.sum == 10
    assert histogram.count == 4
    assert histogram.quantiles(0, 0.5, 1) == [0.5, 1.5, 7]
    assert Histogram((1,)).quantiles(0.5) == [None]
