"""Earlier figures of other engines, from a results file, to compare ours with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..tools.results import BenchError

DEFAULT_FILE = Path("benchmarks/results/peers-h200.json")
"""Used if no file is named; relative to the current directory."""


def peer_figures(file: Path | None) -> Mapping[str, Any]:
    """The contents of the file; empty if none is named and the default one is missing or was measured on
    another kind of GPU than this machine's."""
    if file is None:
        file = DEFAULT_FILE
        if not file.is_file():
            return {}
    try:
        found: Mapping[str, Any] = json.loads(file.read_text())
        gpu = found["machine"]["gpu"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(
            f"{file} is not a file of peers' figures: {type(error).__name__}: {error}"
        ) from error
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return found if gpu == here else {}


def decode_figures(figures: Mapping[str, Any], model: str, batch: int, input_len: int) -> dict[str, Any]:
    """The row of the decode table for this model and batch; empty if there is none."""
    if figures.get("decode", {}).get("input_len") != input_len:
        return {}
    for row in figures["decode"]["rows"]:
        if row["model"] == model and row["batch"] == batch:
            return {key: value for key, value in row.items() if key not in ("model", "batch")}
    return {}


def throughput_figures(figures: Mapping[str, Any], model: str, num_prompts: int, scale: float) -> Any:
    """The throughput row for this model and workload; empty if there is none."""
    found = figures.get("throughput", {})
    fits = found.get("model") == model and found.get("num_prompts") == num_prompts and scale == 1.0
    return {key: found[key] for key in ("tokens_per_s", "limit", "target", "stretch")} if fits else {}


def startup_figures(figures: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Startup figures of the peers for this model, and the target; empty if there are none."""
    for row in figures.get("startup", []):
        if row["model"] == model:
            return {key: value for key, value in row.items() if key != "model"}
    return {}


def on_off_figures(figures: Mapping[str, Any], model: str, batch: int) -> dict[str, Any]:
    """The effect of graphs for the peer with this model and batch; empty if unknown."""
    for row in figures.get("graphs_on_off", {}).get("rows", []):
        if row["model"] == model and row["batch"] == batch:
            return {key: value for key, value in row.items() if key not in ("model", "batch")}
    return {}
