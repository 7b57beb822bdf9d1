"""`ostinato verify`: compares every graph of a model with a reference."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .dataclass_flags import flags_of, with_flags
from .interrupting import import_engine
from .model_argument import ModelArgument, with_model
from .output_file import writable

ENGINE = tuple(flag for flag in flags_of("engine/config.py", "EngineConfig") if flag.name != "seed")
"""Without the engine's seed: --seed is that of the made-up requests."""


@with_flags(engine=ENGINE)
def verify(
    model_name: ModelArgument = None,
    seed: Annotated[int, typer.Option(help="Seed of the made-up requests.", min=0)] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=writable, help="Write every check to this file.")
    ] = None,
    *,
    engine: Mapping[str, Any],
) -> None:
    """Load a model as `serve` would, launch each graph on made-up requests and compare with a reference.

    The exit code is 0 if all graphs are correct and 1 otherwise.
    """
    import_engine()
    from rich.console import Console

    from ostinato.engine.llm import LLM
    from ostinato.engine.verifying.verification import verify as verify_engine
    from ostinato.graphs.capturing.progress import is_terminal

    options = with_model(engine, model_name)
    typer.echo("ostinato: loading the model and capturing graphs", err=True)
    with LLM(options.pop("model", None), **options) as llm:
        typer.echo("ostinato: verifying graphs", err=True)
        outcome = verify_engine(llm.engine.core, seed=seed)
    if json_file is not None:
        outcome.write_json(json_file)
    Console(width=None if is_terminal(sys.stdout) else 80, highlight=False).print(outcome.table())
    raise typer.Exit(0 if outcome.passed else 1)
