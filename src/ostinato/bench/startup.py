"""`ostinato bench startup`: from the start of a process to its first token, phase by phase.

Every measurement is a fresh process. Cold: with empty folders for compiled kernels. Warm: with the same
folders again. The difference is the time to compile.

Python's byte code is not part of that: installing a package compiles it. If the environment forbids storing
byte code, as in single-use images, every import would parse all of torch again. In that case the modules are
imported once before anything is measured, with a folder for their byte code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType

from ostinato.engine.resolved_config import ResolvedConfig

from ..tools.results import BenchError, head, make_table, tell
from .peer_figures import startup_figures
from .subject import Subject

KERNEL_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
"""Where compiled kernels are kept between processes."""


_IMPORTED = """
import importlib.util
import ostinato.engine.llm, ostinato.bench.engine_facts
if importlib.util.find_spec("triton"):
    import triton
"""

_OWN_SIZES = {
    "cuda_graph_max_bs": None,
    "cudagraph_capture_sizes": None,
    "max_cudagraph_capture_size": None,
    "cuda_graph_ladder": "auto",
}


def bench_startup(
    subject: Subject, *, rungs: Sequence[int] = (), figures: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Start cold and warm; with `rungs`, capture again with that many decode and prefill graphs."""
    result = head(
        "startup",
        model=subject.described(),
        rungs=list(rungs),
        method="a fresh process each; cold: empty kernel caches; warm: the same caches again; Python's byte "
        "code is there in both",
    )
    options = {**subject.options, "enable_prefix_caching": False}
    with tempfile.TemporaryDirectory() as caches, tempfile.TemporaryDirectory() as byte_code:
        environment = with_byte_code(os.environ, byte_code)
        environment |= {name: os.path.join(caches, name) for name in KERNEL_CACHES}
        tell("cold start")
        result["cold"] = _start(options, environment, [])
        result["compiled_files"] = sum(len(files) for _, _, files in os.walk(caches))
        tell("warm start")
        result["warm"] = _start(options, environment, ladders(subject.config, rungs))
    result["ladders"] = result["warm"].pop("ladders")
    del result["cold"]["ladders"]
    cold, warm = result["cold"]["seconds"], result["warm"]["seconds"]
    if result["cold"]["first_token"] != result["warm"]["first_token"]:
        raise BenchError("the first token is not the same with compiled kernels from the cache")
    difference = sum(cold[phase] - warm[phase] for phase in ("engine", "first token"))
    result["compile_s"] = difference if result["compiled_files"] else None
    result["peer_figures"] = startup_figures(figures or {}, subject.name)
    return result


def with_byte_code(environment: Mapping[str, str], folder: str) -> dict[str, str]:
    """The environment; if it forbids storing byte code, one that stores it in `folder`, which is filled."""
    kept = {name: value for name, value in environment.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if len(kept) == len(environment):
        return kept
    tell("compiling Python's byte code")
    kept["PYTHONPYCACHEPREFIX"] = folder
    subprocess.run([sys.executable, "-c", _IMPORTED], env=kept, check=True)
    return kept


def _start(
    options: Mapping[str, Any], environment: Mapping[str, str], ladders_: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    asked = {"born": time.time(), "options": options, "ladders": ladders_}
    command = [sys.executable, "-m", "ostinato.bench.startup_process", json.dumps(asked)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise BenchError(f"the measured process ended with code {done.returncode}: see its output above")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def ladders(config: ResolvedConfig, rungs: Sequence[int]) -> list[dict[str, Any]]:
    """Engine options that capture `n` decode graphs, and `n` prefill graphs, for each n in `rungs`: spread
    over the default ladders, always including the largest."""
    decode, prefill = list(config.decode_ladder), list(config.token_ladder)
    found = []
    for count in sorted({min(count, len(decode)) for count in rungs}):
        options: dict[str, Any] = {**_OWN_SIZES, "cuda_graph_mode": "full-decode-only"}
        options["cuda_graph_bs"] = spread(decode, count)
        found.append({"kind": "decode", "rungs": count, "options": options})
    for count in sorted({min(count, len(prefill)) for count in rungs}):
        options = {**_OWN_SIZES, "cuda_graph_bs": [1], "cuda_graph_prefill_tokens": spread(prefill, count)}
        found.append({"kind": "prefill", "rungs": count, "options": options})
    return found


def spread(sizes: Sequence[int], count: int) -> list[int]:
    """`count` of the sizes, spread evenly by rank, always including the last."""
    return [sizes[len(sizes) * (at + 1) // count - 1] for at in range(count)]


def startup_tables(result: Mapping[str, Any]) -> RenderableType:
    """The result as tables."""
    cold, warm = result["cold"], result["warm"]
    name = result["settings"]["model"]["name"]
    phases = [
        *((phase, cold["seconds"][phase], warm["seconds"][phase]) for phase in warm["seconds"]),
        *(
            (f"engine: {phase}", cold["startup_s"].get(phase), seconds)
            for phase, seconds in warm["startup_s"].items()
        ),
    ]
    graphs = [
        (kind, found["number"], warm["startup_s"].get(f"capture {kind}"), found["bytes"] / 2**20)
        for kind, found in warm["graphs"].items()
    ]
    tables: list[RenderableType] = [
        make_table(f"start of {name}, seconds", ["phase", "cold", "warm"], phases),
        make_table("graphs (warm)", ["kind", "number", "seconds", "pool MiB"], graphs),
        f"memory of all graphs together: {graph_mib(warm):.1f} MiB",
    ]
    if result["ladders"]:
        rows = [
            (row["kind"], row["rungs"], row["startup_s"].get(f"capture {row['kind']}"), graph_mib(row))
            for row in result["ladders"]
        ]
        tables.append(make_table("capture against the number of rungs", ["kind", "rungs", "s", "MiB"], rows))
    if result["compile_s"] is not None:
        tables.append(f"compiling: {result['compile_s']:.2f} s, {result['compiled_files']} files")
    for who, found in result["peer_figures"].items():
        tables.append(f"{who} (on file): " + ", ".join(f"{key} {value}" for key, value in found.items()))
    return Group(*tables)


def graph_mib(started: Mapping[str, Any]) -> float:
    """MiB taken by all graphs of an engine: activations, the libraries' workspaces, the driver's share."""
    memory: Mapping[str, int] = started["memory"]
    return sum(memory[part] for part in ("activations", "workspace", "graphs")) / 2**20
