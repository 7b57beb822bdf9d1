"""`ostinato tune`: from a model to a table of kernels, with a report of the measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.table import Table

from ostinato.engine.loading.kernel_table import tuned_table
from ostinato.kernels.gpu import gpu_of
from ostinato.kernels.linear.tables import (
    Choice,
    KernelTable,
    KernelTableError,
    as_entry,
    load_table,
    save_table,
)
from ostinato.kernels.linear.tiles import MatrixShape, Tile
from ostinato.models.errors import DownloadError, ModelError
from ostinato.models.locate import locate_model
from ostinato.models.weights import load_model

from ..machine import machine
from ..results import head, make_table
from .descent import Found, Tuner
from .errors import TuneError


@torch.no_grad()
def tune(
    model_name: str | None, tokens: Sequence[int], file: Path | None, note: Callable[[str], None]
) -> tuple[Path, dict[str, Any]]:
    """Measure at each number of tokens and write the table; returns its file and the raw result.

    The kernels found for a number of tokens also serve smaller ones, down to the previous number in the list.
    Weights are random.
    """
    if not torch.cuda.is_available():
        raise TuneError("tune needs an NVIDIA GPU, but torch finds none on this machine")
    device = torch.device("cuda", torch.cuda.current_device())
    file = file or tuned_table(device)
    try:
        table = load_table(file) if file.is_file() else KernelTable(str(gpu_of(device)), {})
        directory = locate_model(model_name)
        model = load_model(directory, device=device, dtype=torch.bfloat16, load_format="dummy")
    except (ModelError, DownloadError, KernelTableError) as error:
        raise TuneError(str(error)) from error
    tuner = Tuner(model, gpu_of(device))
    all_found: list[Found] = []
    for num_tokens in sorted(set(tokens)):
        found = tuner.find(num_tokens, all_found[-1].tiles if all_found else {})
        note(
            f"{num_tokens} tokens: {found.before_us:.2f} -> {found.layer_us:.2f} us a layer, "
            f"{found.head_before_us:.1f} -> {found.head_us:.1f} us the head"
        )
        all_found.append(found)
        # Keep what was found, in case the rest is interrupted.
        save_table(filled(table, all_found), file, machine=machine())
    return file, result(directory.resolve().name, all_found)


def filled(table: KernelTable, all_found: Sequence[Found]) -> KernelTable:
    """The table with the results, each from the number of tokens before it on."""
    first = 1
    for found in all_found:
        # One token has its own kernels, which the results for more tokens do not serve.
        first = first if found.num_tokens == 1 else max(first, 2)
        for shape, tile in found.tiles.items():
            table = table.but(shape, Choice(first, found.num_tokens, tile))
        first = found.num_tokens + 1
    return table


def result(model: str, all_found: Sequence[Found]) -> dict[str, Any]:
    """The raw figures, for a file."""
    return head("tune", model=model, dtype="bfloat16") | {
        "rows": [
            {
                "tokens": found.num_tokens,
                "layer_us": {
                    "library": round(found.library_us, 2),
                    "before": round(found.before_us, 2),
                    "found": round(found.layer_us, 2),
                },
                "head_us": {"before": round(found.head_before_us, 2), "found": round(found.head_us, 2)},
                "found": {matrix_text(shape): kernel_text(tile) for shape, tile in found.tiles.items()},
                "tried_us": {
                    matrix_text(shape): {kernel_text(tile): round(us, 2) for tile, us in times.items()}
                    for shape, times in found.tried.items()
                },
            }
            for found in all_found
        ]
    }


def matrix_text(shape: MatrixShape) -> str:
    """A matrix's name in results."""
    return f"{shape.out_features} x {shape.in_features}" + (" gated" if shape.gated else "")


def kernel_text(tile: Tile) -> str:
    """A kernel's name, with its tile, in results."""
    entry = as_entry(tile)
    values = ", ".join(f"{name} {value}" for name, value in entry.get("tile", {}).items())
    return f"{entry['kernel']}: {values}" if values else entry["kernel"]


def tables(found: dict[str, Any]) -> Group:
    """Which kernels won, and by how much."""
    name = found["settings"]["model"]
    times = make_table(
        f"{name}: microseconds of a layer (attention included) and of the head",
        ("tokens", "cuBLAS", "before", "now", "saved", "head before", "head now"),
        (
            (
                row["tokens"],
                row["layer_us"]["library"],
                row["layer_us"]["before"],
                row["layer_us"]["found"],
                f"{1 - row['layer_us']['found'] / row['layer_us']['before']:.1%}",
                row["head_us"]["before"],
                row["head_us"]["found"],
            )
            for row in found["rows"]
        ),
    )
    kernels = Table(title="Kernels", title_justify="left")
    for heading in ("tokens", "matrix", "kernel"):
        kernels.add_column(heading)
    for row in found["rows"]:
        for matrix, kernel in row["found"].items():
            kernels.add_row(str(row["tokens"]), matrix, kernel)
    return Group(times, kernels)
