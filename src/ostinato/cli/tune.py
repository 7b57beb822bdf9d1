"""`ostinato tune`: writes a kernel table for this GPU and a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .bench import numbers
from .output_file import writable


def tune(
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "--model-path", help="Model to tune for: a directory with a config.json or a hub name."
        ),
    ] = None,
    tokens: Annotated[
        str, typer.Option(help="Tokens per step to measure at, as a list.")
    ] = "1,8,16,32,64,128,256",
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write the table to; an existing table is extended. Default: a file in the cache "
            "folder, where engines find it."
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=writable, help="Write all measurements to this file.")
    ] = None,
) -> None:
    """Find the fastest kernels for a model's linear layers on this GPU, by timing them.

    The kernels found for a number of tokens are used for steps of up to that many tokens and of more than
    the previous number in the list. Engines use the table from their next start on.
    """
    from ostinato.tools.results import write_json
    from ostinato.tools.tune.tuning import tables
    from ostinato.tools.tune.tuning import tune as run_tune

    from .narrow_tables import show

    def note(text: str) -> None:
        typer.echo(f"ostinato: {text}", err=True)

    file, result = run_tune(model, numbers("--tokens", tokens), out, note)
    if json_file is not None:
        write_json(result, json_file)
    show(tables(result))
    note(f"table written to {file}")
