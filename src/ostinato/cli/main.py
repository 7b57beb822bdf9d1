"""`ostinato`: the commands. Heavy imports stay inside them, so that --help answers at once."""

from typing import Annotated

import typer

from .bench import app as bench
from .bench_serving import bench_http, bench_serving
from .generate import chat, generate
from .serve import serve
from .tune import tune
from .verify import verify

app = typer.Typer(
    help="A CUDA Graph runtime for LLM inference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")

app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command()(tune)
app.command()(verify)
bench.command("serving")(bench_serving)
bench.command("http")(bench_http)

Device = Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one.")]


@app.command()
def demo(device: Device = None) -> None:
    """Capture a small model, serve random batches from graphs, verify, and print the report."""
    from rich.console import Console

    from ostinato.tools.demo import demo as run_demo

    run_demo(_device(device), Console())


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
