"""What Prometheus, the page and `/graphs` are told."""

import json
import re
import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from ostinato.server.metrics.histogram import Histogram

from .server_process import ServerProcess

DASHBOARD = Path(__file__).parents[2] / "dashboards" / "ostinato.json"
BODY = {"prompt": "metrics a", "max_tokens": 10, "temperature": 0}


def samples(server: ServerProcess) -> dict[str, float]:
    """Sums over all labels, by the name of the series."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def test_metrics_move_with_requests(server: ServerProcess) -> None:
    server.wait_until_idle()
    before = samples(server)
    for _ in range(3):
        assert server.post("/v1/completions", BODY).status_code == 200
    time.sleep(1.2)  # statistics of the engine come twice a second
    after = samples(server)

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
    text = server.get("/metrics").text
    assert re.search(r'graph_replays_total\{kind="decode",mode="full",model_name="scripted",rung="4"\}', text)
    assert re.search(r'eager_steps_total\{.*reason="', text) or "eager_steps" in text


def test_every_metric_of_the_dashboard_exists(server: ServerProcess) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(expressions) >= 10
    offered = samples(server).keys() | set(re.findall(r"# TYPE (\S+)", server.get("/metrics").text))
    for name in {name for text in expressions for name in re.findall(r"ostinato:\w+", text)}:
        assert name in offered or name.removesuffix("_total") in offered, name


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
