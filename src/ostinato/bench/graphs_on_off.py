"""`ostinato bench graphs-on-off`: the effect of graphs: the same engine with and without them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType

from ostinato.engine.llm import LLM

from ..tools.results import BenchError, head, make_table, share, tell
from .check import checked_part, compare_with
from .contest import Ours, equal_share
from .decode import Decoded, decoded
from .engine_facts import engine_facts
from .peer_figures import on_off_figures
from .subject import WITHOUT_GRAPHS, Subject
from .workload import Workload


def bench_graphs_on_off(
    subject: Subject,
    *,
    batch_sizes: Sequence[int],
    input_len: int,
    output_len: int,
    repeats: int,
    figures: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """TPOT and tokens per second by batch size, with graphs and in mode none."""
    if output_len < 2:
        raise BenchError(f"output_len must be at least 2, not {output_len}: TPOT is a difference")
    workloads = [
        Workload.uniform(batch, input_len, output_len, subject.shape.vocab_size) for batch in batch_sizes
    ]
    result = head(
        "graphs-on-off",
        model=subject.described(),
        input_len=input_len,
        output_len=output_len,
        repeats=repeats,
        method="TPOT = (T(N) - T(1)) / (N - 1), median of the repeats; greedy, no prefix cache",
    )
    batch, length = max(map(len, workloads)), max(workload.longest for workload in workloads) + 1
    with subject.start(batch, length) as llm:
        on = [_measured(llm, workload, repeats) for workload in workloads]
        result["engine"] = engine_facts(llm)
    with subject.start(batch, length, **WITHOUT_GRAPHS) as llm:
        off = [_measured(llm, workload, repeats) for workload in workloads]
        runs = [
            (f"batch {len(workload)}, graphs {name}", found[0].whole.tokens)
            for name, side in (("on", on), ("off", off))
            for workload, found in zip(workloads, side, strict=True)
        ]
        part = checked_part(max(workloads, key=len))
        result["checks"] = [compare_with(llm, subject, part, runs)]
    result["rows"] = [
        _row(subject, workload, with_graphs, without, figures or {})
        for workload, with_graphs, without in zip(workloads, on, off, strict=True)
    ]
    return result


def _measured(llm: LLM, workload: Workload, repeats: int) -> list[Decoded]:
    engine = Ours(llm)
    tell(f"mode {llm.graph_report().mode}, {workload}")
    engine.run(workload.shortened(2))
    return [decoded(engine, workload) for _ in range(repeats)]


def _row(
    subject: Subject,
    workload: Workload,
    on: Sequence[Decoded],
    off: Sequence[Decoded],
    figures: Mapping[str, Any],
) -> dict[str, Any]:
    tpot_on, tpot_off = (statistics.median(run.tpot_ms for run in side) for side in (on, off))
    return {
        "batch": len(workload),
        "tpot_ms_on": tpot_on,
        "tpot_ms_off": tpot_off,
        "tokens_per_s_on": statistics.median(run.whole.tokens_per_s for run in on),
        "tokens_per_s_off": statistics.median(run.whole.tokens_per_s for run in off),
        "gain": tpot_off / tpot_on,
        "equal_tokens": equal_share(on[0].whole, off[0].whole),
        "peer_figures": on_off_figures(figures, subject.name, len(workload)),
    }


def graphs_on_off_tables(result: Mapping[str, Any]) -> RenderableType:
    """The result as tables."""
    settings = result["settings"]
    model = settings["model"]
    known = any(row["peer_figures"] for row in result["rows"])
    headings = ["batch", "off ms", "on ms", "gain", "off tokens/s", "on tokens/s", "equal tokens"]
    rows = [
        [
            *(row["batch"], row["tpot_ms_off"], row["tpot_ms_on"], row["gain"]),
            *(row["tokens_per_s_off"], row["tokens_per_s_on"], share(row["equal_tokens"])),
            *((row["peer_figures"].get("off_ms"), row["peer_figures"].get("on_ms")) if known else ()),
        ]
        for row in result["rows"]
    ]
    title = f"graphs off and on: TPOT of {model['name']}, {model['dtype']} on {model['device']}"
    eager = ", ".join(f"{reason} {count}" for reason, count in result["engine"]["eager_steps"].items())
    return Group(
        make_table(title, [*headings, *(("SGLang off", "SGLang on") if known else ())], rows),
        f"eager steps with graphs on: {eager or 'none'}",
    )
