"""`ostinato`: the commands. Heavy imports stay inside them, so that --help answers at once."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from .generate import chat, generate

app = typer.Typer(
    help="A CUDA Graph runtime for LLM inference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(
    help="Measure, and write results with the machine they were measured on.", no_args_is_help=True
)
app.add_typer(bench, name="bench")

app.command()(generate)
app.command()(chat)

Device = Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one.")]


@app.command()
def demo(device: Device = None) -> None:
    """Capture a small model, serve random batches from graphs, verify, and print the report."""
    from rich.console import Console

    from ostinato.tools.demo import demo as run_demo

    run_demo(_device(device), Console())


@bench.command("graphs")
def bench_graphs_command(
    device: Device = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
) -> None:
    """What a replay costs: chains of small ops, CPU time of run(), capture time and memory."""
    from rich.console import Console

    from ostinato.tools.bench_graphs import as_tables, bench_graphs

    result = bench_graphs(_device(device))
    Console(width=160 if not sys.stdout.isatty() else None).print(as_tables(result))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result, indent=2) + "\n")


@app.command()
def version() -> None:
    """Print the version."""
    from ostinato import __version__

    typer.echo(__version__)


def _device(name: str | None):  # type: ignore[no-untyped-def]
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def main() -> None:
    """The entry point: errors of ours are told in one line."""
    try:
        app()
    except Exception as error:
        from ostinato.graphs.errors import OstinatoError

        if not isinstance(error, OstinatoError):
            raise
        typer.echo(f"ostinato: {error}", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
