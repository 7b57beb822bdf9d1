"""`ostinato bench serving` and `ostinato bench http`: load on a server, and the cost of HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from .bench import JsonFile, PngFile
from .dataclass_flags import flags_of, with_flags

ENGINE = flags_of("engine/config.py", "EngineConfig")
LOAD = flags_of("bench/serving.py", "ServingLoad")
HTTP_LOAD = flags_of("bench/http_load.py", "HttpLoad")


@with_flags(load=LOAD)
def bench_serving(
    json_file: JsonFile = None,
    png_file: PngFile = None,
    *,
    load: Mapping[str, Any],
) -> None:
    """Send open-loop load to any OpenAI-compatible server: latencies, throughput, goodput."""
    from ostinato.bench.serving import ServingLoad, as_table, send_load, write_plot
    from ostinato.graphs.errors import ConfigError
    from ostinato.tools.results import head, write_json

    from .narrow_tables import show

    try:
        result = send_load(ServingLoad(**load))
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed: run pip install -e '.[bench]' in Ostinato's folder"
        ) from error
    show(as_table(result))
    if json_file is not None:
        write_json({**head("serving"), **result}, json_file)
    if png_file is not None:
        write_plot(result, png_file)
    if result["finished"] == 0:
        raise typer.Exit(1)


@with_flags(engine=ENGINE, load=HTTP_LOAD)
def bench_http(json_file: JsonFile = None, *, engine: Mapping[str, Any], load: Mapping[str, Any]) -> None:
    """Compare the throughput of a server with that of the engine alone, at a number of streams."""
    from ostinato.bench.http_load import HttpLoad, as_tables
    from ostinato.bench.http_load import bench_http as measure
    from ostinato.bench.subject import Subject
    from ostinato.tools.results import write_json

    from .narrow_tables import show

    result = measure(Subject.of(engine), HttpLoad(**load))
    show(as_tables(result))
    if json_file is not None:
        write_json(result, json_file)
