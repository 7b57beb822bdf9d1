"""The peers' figures on file, and on which machine they are shown."""

import json
from pathlib import Path

import pytest
import torch

from ostinato.bench.peer_figures import (
    decode_figures,
    on_off_figures,
    peer_figures,
    startup_figures,
    throughput_figures,
)

FILE = Path(__file__).parents[2] / "benchmarks" / "results" / "peers-h200.json"


def test_figures_are_shown_on_the_gpu_they_are_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    figures = peer_figures(FILE)
    assert decode_figures(figures, "qwen3-0.6b", 256, 128)["tpot_ms"] == {"vLLM": 7.16, "SGLang": 4.51}
    assert decode_figures(figures, "llama-3.1-8b", 1, 128)["target_ms"] == 3.75
    assert decode_figures(figures, "qwen3-0.6b", 256, 1024) == {}, "measured with prompts of 128 tokens"
    assert throughput_figures(figures, "qwen3-0.6b", 256, 1.0)["tokens_per_s"]["vLLM"] == 23528
    assert throughput_figures(figures, "qwen3-0.6b", 256, 0.5) == {}
    assert on_off_figures(figures, "llama-3.1-8b", 8) == {"off_ms": 19.1, "on_ms": 4.9}
    assert startup_figures(figures, "qwen3-0.6b")["target"]["cold_s"] == 12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L4")
    assert peer_figures(FILE) == {}


def test_no_row_of_the_file_asks_for_less_than_the_best_peer() -> None:
    rows = json.loads(FILE.read_text())["decode"]["rows"]
    assert len(rows) == 12
    for row in rows:
        assert row["limit_ms"] < row["stretch_ms"] < row["target_ms"] < min(row["tpot_ms"].values())
