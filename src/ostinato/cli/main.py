"""The `ostinato` commands. Heavy imports stay inside them, so that --help answers at once."""

import io
import logging
import sys
from typing import Annotated

import typer

from .bench import app as bench
from .bench_serving import bench_http, bench_serving
from .engine_command import EngineCommand, ServerCommand
from .generate import chat, generate
from .serve import serve
from .tune import tune
from .verify import verify

app = typer.Typer(
    help="Run language models from CUDA graphs: generate, chat, serve, benchmark, verify.",
    epilog="Flags of vLLM and SGLang work too. See `ostinato COMMAND -h` for details.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

app.command(cls=EngineCommand, short_help="Answer a prompt.")(generate)
app.command(cls=EngineCommand, short_help="Chat with a model.")(chat)
app.command(cls=ServerCommand, short_help="Serve a model over the OpenAI API, with a live page.")(serve)
app.command(cls=EngineCommand, short_help="Check every graph of a model against a reference.")(verify)
app.add_typer(bench, name="bench", short_help="Run benchmarks; see `ostinato bench -h`.")
app.command(short_help="Find the fastest kernels for a model on this GPU.")(tune)
bench.command("serving", cls=EngineCommand, short_help="Send load to an OpenAI-compatible server.")(
    bench_serving
)
bench.command("http", cls=EngineCommand, short_help="Cost of HTTP, against the engine alone.")(bench_http)

Device = Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda if available.")]


def _show_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(short_help="Show the graph runtime on a small model.")
def demo(device: Device = None) -> None:
    """Capture a small model, serve random batches from graphs, verify them and print the report."""
    from rich.console import Console

    from ostinato.engine.resolved_config import device_of
    from ostinato.tools.demo import demo as run_demo

    run_demo(device_of(device or "auto"), Console())


@app.command()
def version() -> None:
    """Print the version."""
    from ostinato import __version__

    typer.echo(f"ostinato {__version__}")


def main() -> None:
    """Run a command. Errors of Ostinato's own types, and those of files, are printed as one line."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # for `as_text`
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # models write what not every terminal can show
    told = logging.StreamHandler()
    told.setFormatter(logging.Formatter("ostinato: %(message)s"))
    logging.getLogger("ostinato").addHandler(told)
    try:
        app()
    except Exception as error:
        from ostinato.graphs.errors import OstinatoError

        if not isinstance(error, OstinatoError | OSError):
            raise
        typer.echo(f"ostinato: {_told(error)}", err=True)
        raise SystemExit(1) from None


def _told(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
