"""Facts about an engine, for a result: startup, graphs, memory, steps without a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ostinato.engine.llm import LLM


def engine_facts(llm: LLM) -> dict[str, Any]:
    """The present facts; at the end of a benchmark, steps without a graph are those of all its runs."""
    return {
        "startup_s": llm.startup_times(),
        "graphs": graphs_by_kind(llm),
        "memory": llm.memory_report(),
        "eager_steps": dict(llm.graph_report().eager_steps),
    }


def graphs_by_kind(llm: LLM) -> dict[str, dict[str, float]]:
    """Number, bytes in the pool and recording time of the decode, prefill and sampling graphs."""
    rows = [
        ("decode" if row.descriptor.startswith("decode") else "prefill", row)
        for row in llm.graph_report().graphs
    ]
    sampling = llm.sampling_report()
    if sampling is not None:
        rows += [("sampling", row) for row in sampling.graphs]
    return {
        kind: {
            "number": len(of_kind),
            "bytes": sum(row.bytes for row in of_kind),
            "recording_s": sum(row.capture_ms for row in of_kind) / 1e3,
        }
        for kind in ("decode", "prefill", "sampling")
        if (of_kind := [row for name, row in rows if name == kind])
    }
