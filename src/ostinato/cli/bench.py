"""`ostinato bench`: one command per benchmark; prints a table, and writes JSON and PNG on request."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ostinato.bench import SCRIPTS

from .dataclass_flags import NUMBERS, flags_of, with_flags
from .engine_command import EngineCommand
from .interrupting import import_engine
from .output_file import writable

if TYPE_CHECKING:
    from ostinato.bench.subject import Subject

app = typer.Typer(
    help="Run benchmarks, check their output, and write results with a description of the machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

ENGINE = flags_of("engine/config.py", "EngineConfig")
Number = TypeVar("Number", int, float)

JsonFile = Annotated[
    Path | None, typer.Option("--json", callback=writable, help="Write the result to this file.")
]
PngFile = Annotated[
    Path | None, typer.Option("--png", callback=writable, help="Plot the result to this file.")
]
BatchSizes = Annotated[str | None, typer.Option(help="Batch sizes in requests, as 1,8,32.", metavar=NUMBERS)]
OutputLen = Annotated[int | None, typer.Option(help="Output tokens per request.")]
Repeats = Annotated[int, typer.Option(min=1, help="Number of measurements; the median is reported.")]
PeerName = Annotated[
    str | None,
    typer.Option("--peer", help="Also run transformers, vllm or sglang, in a separate process."),
]
PeersFile = Annotated[
    Path | None,
    typer.Option(help="Figures of other engines to show [default: those in benchmarks/results]."),
]


@app.command("graphs", cls=EngineCommand, short_help="Cost of a replay: ops, CPU time, memory.")
def graphs(
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda if available.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Cost of a replay: chains of small ops, CPU time of run(), capture time and memory."""
    from ostinato.bench.graphs import as_tables, bench_graphs
    from ostinato.engine.resolved_config import device_of

    result = bench_graphs(device_of(device or "auto"))
    _deliver(result, as_tables, json_file, None)


@app.command("decode", cls=EngineCommand, short_help="Time per output token, by batch size.")
@with_flags(engine=ENGINE)
def decode(
    batch_sizes: BatchSizes = None,
    input_len: Annotated[
        str | None, typer.Option(help="Tokens per prompt, as 128 or 128,1024.", metavar=NUMBERS)
    ] = None,
    output_len: OutputLen = None,
    repeats: Repeats = 3,
    peer: PeerName = None,
    peers_file: PeersFile = None,
    json_file: JsonFile = None,
    png_file: PngFile = None,
    *,
    engine: Mapping[str, Any],
) -> None:
    """Time per output token by batch size, compared with the limit set by memory bandwidth.

    Defaults: batch 1,8,32,128,256 with 128 tokens in and out on a GPU; batch 1,16 with 32 in and out on a
    CPU.
    """
    from ostinato.bench.decode import bench_decode, decode_tables
    from ostinato.bench.peer_figures import peer_figures

    subject = _subject(engine, png_file)
    gpu = subject.on_gpu
    result = bench_decode(
        subject,
        batch_sizes=numbers("--batch-sizes", batch_sizes or ("1,8,32,128,256" if gpu else "1,16")),
        input_lens=numbers("--input-len", input_len or ("128" if gpu else "32")),
        output_len=_given(output_len, 128 if gpu else 32),
        repeats=repeats,
        peer_name=peer,
        figures=peer_figures(peers_file),
    )
    _deliver(result, decode_tables, json_file, png_file)


@app.command("prefill", cls=EngineCommand, short_help="Prompt tokens per second.")
@with_flags(engine=ENGINE)
def prefill(
    input_len: Annotated[
        str | None, typer.Option(help="Tokens per prompt, as 512 or 512,4096.", metavar=NUMBERS)
    ] = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Prompt tokens per batch. [default: 16384 on a GPU, 512 on a CPU]"),
    ] = None,
    repeats: Repeats = 3,
    peer: PeerName = None,
    json_file: JsonFile = None,
    png_file: PngFile = None,
    *,
    engine: Mapping[str, Any],
) -> None:
    """Prompt tokens per second, for one prompt and for a batch of prompts.

    Defaults: 512, 4096 and 16384 tokens on a GPU, 64 and 256 on a CPU.
    """
    from ostinato.bench.prefill import bench_prefill, prefill_tables

    subject = _subject(engine, png_file)
    gpu = subject.on_gpu
    result = bench_prefill(
        subject,
        input_lens=numbers("--input-len", input_len or ("512,4096,16384" if gpu else "64,256")),
        batch_tokens=_given(batch_tokens, 16384 if gpu else 512),
        repeats=repeats,
        peer_name=peer,
    )
    _deliver(result, prefill_tables, json_file, png_file)


@app.command("throughput", cls=EngineCommand, short_help="Output tokens per second, offline.")
@with_flags(engine=ENGINE)
def throughput(
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Number of requests. [default: 256 on a GPU, 16 on a CPU]")
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(min=0, help="Multiply all lengths by this. [default: 1 on a GPU, 0.1 on a CPU]"),
    ] = None,
    repeats: Repeats = 1,
    peer: PeerName = None,
    peers_file: PeersFile = None,
    json_file: JsonFile = None,
    png_file: PngFile = None,
    *,
    engine: Mapping[str, Any],
) -> None:
    """Output tokens per second for requests with 100 to 1024 tokens in and out, submitted all at once."""
    from ostinato.bench.peer_figures import peer_figures
    from ostinato.bench.throughput import bench_throughput, throughput_tables

    subject = _subject(engine, png_file)
    result = bench_throughput(
        subject,
        num_prompts=_given(num_prompts, 256 if subject.on_gpu else 16),
        scale=_given(scale, 1.0 if subject.on_gpu else 0.1),
        repeats=repeats,
        peer_name=peer,
        figures=peer_figures(peers_file),
    )
    _deliver(result, throughput_tables, json_file, png_file)


@app.command("startup", cls=EngineCommand, short_help="Time from process start to the first token.")
@with_flags(engine=ENGINE)
def startup(
    rungs: Annotated[
        str | None,
        typer.Option(
            help="Also capture with these numbers of decode and prefill graphs, as 4,9,18.", metavar=NUMBERS
        ),
    ] = None,
    peers_file: PeersFile = None,
    json_file: JsonFile = None,
    png_file: PngFile = None,
    *,
    engine: Mapping[str, Any],
) -> None:
    """Time from process start to the first token, with an empty and with a filled kernel cache."""
    from ostinato.bench.peer_figures import peer_figures
    from ostinato.bench.startup import bench_startup, startup_tables

    subject = _subject(engine, png_file)
    counts = numbers("--rungs", rungs) if rungs else []
    result = bench_startup(subject, rungs=counts, figures=peer_figures(peers_file))
    _deliver(result, startup_tables, json_file, png_file)


@app.command("host", cls=EngineCommand, short_help="CPU time of a decode step, by part.")
@with_flags(engine=ENGINE)
def host(
    batch_sizes: BatchSizes = None,
    output_len: OutputLen = None,
    repeats: Repeats = 3,
    json_file: JsonFile = None,
    png_file: PngFile = None,
    *,
    engine: Mapping[str, Any],
) -> None:
    """CPU time of a steady decode step by part; on a GPU also idle time and launches.

    Defaults: batch 1 to 512 and 128 tokens on a GPU, batch 1,4,16 and 32 tokens on a CPU.
    """
    from ostinato.bench.host import bench_host, host_tables

    subject = _subject(engine, png_file)
    sizes = batch_sizes or ("1,2,4,8,16,32,64,128,256,512" if subject.on_gpu else "1,4,16")
    result = bench_host(
        subject,
        batch_sizes=numbers("--batch-sizes", sizes),
        output_len=_given(output_len, 128 if subject.on_gpu else 32),
        repeats=repeats,
    )
    _deliver(result, host_tables, json_file, png_file)


@app.command("graphs-on-off", cls=EngineCommand)
@with_flags(engine=ENGINE)
def graphs_on_off(
    batch_sizes: BatchSizes = None,
    input_len: Annotated[int | None, typer.Option(help="Tokens per prompt.")] = None,
    output_len: OutputLen = None,
    repeats: Repeats = 3,
    peers_file: PeersFile = None,
    json_file: JsonFile = None,
    png_file: PngFile = None,
    *,
    engine: Mapping[str, Any],
) -> None:
    """Effect of graphs: the same engine with and without them.

    Defaults: batch 1,8,32,128 with 128 tokens in and out on a GPU; batch 1,4,16 with 32 in and 16 out on a
    CPU.
    """
    from ostinato.bench.graphs_on_off import bench_graphs_on_off, graphs_on_off_tables
    from ostinato.bench.peer_figures import peer_figures

    subject = _subject(engine, png_file)
    gpu = subject.on_gpu
    result = bench_graphs_on_off(
        subject,
        batch_sizes=numbers("--batch-sizes", batch_sizes or ("1,8,32,128" if gpu else "1,4,16")),
        input_len=_given(input_len, 128 if gpu else 32),
        output_len=_given(output_len, 128 if gpu else 16),
        repeats=repeats,
        figures=peer_figures(peers_file),
    )
    _deliver(result, graphs_on_off_tables, json_file, png_file)


@app.command("plot")
def plot(
    results: Annotated[list[Path], typer.Argument(help="JSON files written by the other commands.")],
    out: Annotated[Path, typer.Option(help="Folder for the plots.")] = Path("docs/plots"),
) -> None:
    """Plot result files, each to a PNG of the same name."""
    from ostinato.bench.plots import write_plots

    for picture in write_plots(results, out):
        typer.echo(picture)


def _add_script(name: str, measures: str) -> None:
    """Adds a benchmark that reads its own arguments: `python -m ostinato.bench.NAME`."""
    takes_all = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(name, context_settings=takes_all, short_help=measures)
    def run(context: typer.Context) -> None:
        from ostinato.bench.repository import needs_repository

        needs_repository()
        sys.argv = [f"ostinato bench {name}", *context.args]
        runpy.run_module(f"ostinato.bench.{name.replace('-', '_')}", run_name="__main__", alter_sys=True)


for _name, _measures in SCRIPTS.items():
    _add_script(_name, _measures)


def _subject(engine: Mapping[str, Any], png_file: Path | None) -> Subject:
    import_engine()
    from ostinato.bench.subject import Subject

    if png_file is not None:
        from ostinato.bench.plots import check_picture

        check_picture(png_file)
    return Subject.of(engine)


def _given(value: Number | None, default: Number) -> Number:
    """What was given, a zero too."""
    return default if value is None else value


def numbers(flag: str, given: str) -> list[int]:
    """Parse the value of a flag that takes a list of numbers."""
    try:
        numbers = [int(part) for part in given.replace(",", " ").split()]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"{flag}: {given!r} is not a list of positive integers such as 1,8,32")
    return numbers


def _deliver(
    result: dict[str, Any],
    tables: Callable[[dict[str, Any]], Any],
    json_file: Path | None,
    png_file: Path | None,
) -> None:
    from ostinato.tools.results import write_json

    from .narrow_tables import show

    if json_file is not None:
        write_json(result, json_file)
    show(tables(result))
    if png_file is not None:
        from ostinato.bench.plots import write_plot

        write_plot(result, png_file)
