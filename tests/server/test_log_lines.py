"""How much a server says: not a line too many."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ostinato.server import log_lines, throughput_log
from ostinato.server.http.refusal_log import RefusalLines, RefusalLog
from ostinato.server.log_lines import MOST_PER_SECOND, LimitedLines
from ostinato.server.metrics.request_metrics import RequestMetrics
from ostinato.server.throughput_log import ThroughputLog


class Clock:
    """A clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(log_lines.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(throughput_log, "monotonic", lambda: self.now)


def test_a_flood_is_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock, lines = Clock(monkeypatch), LimitedLines("requests were refused")
    for number in range(MOST_PER_SECOND + 7):
        lines.say(f"number {number}")
    clock.now += 1
    lines.say("another")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == MOST_PER_SECOND + 2
    assert said[-2].endswith(" 7 more requests were refused")
    assert said[-1].endswith(" another")


def test_throughput_is_told_while_there_is_any(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, metrics = Clock(monkeypatch), RequestMetrics()
    engine: Any = SimpleNamespace(num_unfinished=0, statistics=None)
    log = ThroughputLog(SimpleNamespace(metrics=metrics, engine=engine))  # type: ignore[arg-type]
    clock.now += 10
    assert log.line() is None
    metrics.prompt_tokens, metrics.generation_tokens = 1000, 25000
    clock.now += 10
    assert log.line() == "2,500.0 tokens/s out, 100.0 in"
    assert log.line() is None
    engine.num_unfinished = 3
    engine.statistics = SimpleNamespace(
        running=2, waiting=1, pages_free=75, pages_usable=100, prefix_hit_tokens=1, prefix_queried_tokens=8
    )
    metrics.generation_tokens += 5
    clock.now += 10
    expected = "0.5 tokens/s out, 0.0 in; 2 running, 1 waiting; KV cache 25.0% used, prefix hits 12.5%"
    assert log.line() == expected


def test_no_path_of_a_client_makes_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b"no\x1b[2J\nsuch"})

    async def ignored(message: Any) -> None:
        pass

    path = "/v1/models/a\nostinato: 12:00:00 all is well\x1b[2J" + "x" * 10_000
    scope = {"type": "http", "method": "GET", "path": path}
    asyncio.run(RefusalLog(refuse, RefusalLines())(scope, ignored, ignored))  # type: ignore[arg-type]
    [line] = capsys.readouterr().err.splitlines()
    assert "GET /v1/models/a\\nostinato: 12:00:00 all is well\\x1b[2J" in line
    assert line.endswith(r"404: no\x1b[2J such")
    assert len(line) < 1000
