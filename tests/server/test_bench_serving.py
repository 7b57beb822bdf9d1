"""`ostinato bench serving` against a real server, and its arithmetic."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostinato.bench.serving import ServingLoad, percentiles, plan, summary
from ostinato.cli.main import app
from ostinato.graphs.errors import ConfigError
from ostinato.tools.openai_stream import StreamedRequest

from .server_process import ServerProcess


def test_a_load_is_measured(server: ServerProcess, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs pip install 'ostinato[bench]'")
    result_file, plot_file = tmp_path / "result.json", tmp_path / "plot.png"
    flags = ["--num-requests", "20", "--request-rate", "40", "--max-len", "20", "--input-len", "6"]
    files = ["--json", str(result_file), "--png", str(plot_file)]
    done = CliRunner().invoke(app, ["bench", "serving", "--base-url", server.url, *flags, *files])
    assert done.exit_code == 0, done.output
    assert "time to first token" in done.stdout
    result = json.loads(result_file.read_text())
    assert (result["finished"], result["failed"]) == (20, 0)
    assert result["output_tokens"] == sum(request["output_tokens"] for request in result["requests"])
    assert result["load"]["model"] == "scripted"
    assert result["output_tokens_per_second"] > 0
    for key in ("ttft_ms", "tpot_ms", "itl_ms", "latency_ms"):
        found = result[key]
        assert 0 < found["p50"] <= found["p95"] <= found["p99"] <= found["max"]
    assert plot_file.read_bytes().startswith(b"\x89PNG")


def test_chat_with_a_concurrency(server: ServerProcess) -> None:
    flags = ["--endpoint", "chat", "--num-requests", "6", "--request-rate", "0", "--max-concurrency", "2"]
    lengths = ["--input-len", "5", "--output-len", "4"]
    done = CliRunner().invoke(app, ["bench", "serving", "--base-url", server.url, *flags, *lengths])
    assert done.exit_code == 0, done.output
    assert "6 finished" in done.stdout


def test_a_server_that_refuses_is_told(server: ServerProcess) -> None:
    done = CliRunner().invoke(app, ["bench", "serving", "--base-url", server.url, "--model", "another"])
    assert isinstance(done.exception, ConfigError)
    assert "does not exist" in str(done.exception)


def test_arrivals_are_poisson_and_repeatable() -> None:
    load = ServingLoad(num_requests=4000, request_rate=10, input_len=1, output_len=1)
    planned = plan(load, "m")
    assert planned == plan(load, "m")
    gaps = [later.at - earlier.at for earlier, later in pairwise(planned)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.1, rel=0.1)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance**0.5 == pytest.approx(mean, rel=0.1)


def test_lengths_are_spread_like_conversations() -> None:
    bodies = [request.body for request in plan(ServingLoad(num_requests=2000), "m")]
    outputs = sorted(body["max_tokens"] for body in bodies)
    assert 120 < outputs[1000] < 180
    assert outputs[0] >= 4
    assert outputs[-1] == 1024
    prompts = sorted(len(body["prompt"].split()) for body in bodies)
    assert 70 < prompts[1000] < 110


def test_long_prompts_come_among_the_others() -> None:
    load = ServingLoad(num_requests=1000, long_share=0.2, long_len=3000, token_ids=50)
    lengths = [len(request.body["prompt"]) for request in plan(load, "m")]
    assert 150 < lengths.count(3000) < 250
    assert all(length == 3000 or length <= load.max_len for length in lengths)
    results = [
        StreamedRequest(0.0, length, 2, [length / 1e3, length / 1e3 + 1], 4.0) for length in (3000, 10)
    ]
    found = summary(load, "m", results)
    assert [found[kind]["ttft_ms"]["p50"] for kind in ("long", "others")] == [3000, 10]
    with pytest.raises(ConfigError, match="long_share must be from 0 to 1, not 2"):
        ServingLoad(long_share=2)


def test_goodput_counts_requests_within_both_limits() -> None:
    def request(first: float, per_token: float) -> StreamedRequest:
        arrivals = [first + per_token * number for number in range(5)]
        return StreamedRequest(0.0, 3, 5, arrivals, arrivals[-1])

    failed = StreamedRequest(0.0, ended=1.0, error="HTTP 500")
    results = [request(0.1, 0.01), request(0.9, 0.01), request(0.1, 0.2), failed]
    found = summary(ServingLoad(slo_ttft_ms=500, slo_tpot_ms=50), "m", results)
    assert found["goodput_share"] == 0.25
    assert (found["finished"], found["failed"]) == (3, 1)
    assert found["tpot_ms"]["max"] == pytest.approx(200)


def test_percentiles() -> None:
    found = percentiles([number / 1000 for number in range(1, 102)])
    assert found is not None
    assert (found["p50"], found["p95"], found["p99"]) == pytest.approx((51, 96, 100))
    assert percentiles([]) is None


@pytest.mark.slow
def test_http_is_compared_with_the_engine_inside(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result_file = tmp_path / "result.json"
    lengths = ["--input-len", "8", "--output-len", "40"]
    load = ["--streams", "8", "--num-requests", "16", "--repeats", "1", *lengths]
    small = ["--num-pages", "200", "--max-model-len", "128", "--cuda-graph-bs", "8"]
    command = ["bench", "http", "--model", str(model), *load, *small, "--json", str(result_file)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    result = json.loads(result_file.read_text())
    offline, served = result["median_offline_tokens_per_second"], result["median_served_tokens_per_second"]
    assert result["overhead_share"] == pytest.approx(1 - served / offline)
    assert min(offline, served) > 0
    assert result["settings"]["tokenizer"] == "the model's own"
