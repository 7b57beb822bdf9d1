"""`ostinato bench throughput`: many requests of mixed lengths at once, output tokens per second."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType

from ..tools.results import BenchError, head, make_table
from .check import check_tokens, tokens_hash
from .contest import OURS, Contestant, Run, compete, ours
from .peer_figures import throughput_figures
from .peers.process import peer
from .subject import Subject
from .workload import Workload


def _served(contestant: Contestant, workload: Workload) -> Run:
    return contestant.run(workload)


def bench_throughput(
    subject: Subject,
    *,
    num_prompts: int,
    scale: float,
    repeats: int,
    peer_name: str | None = None,
    figures: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Serve `Workload.mixed`; with a peer, both sides and their ratio."""
    if not scale > 0:
        raise BenchError(f"scale must be above 0, not {scale:g}")
    workload = Workload.mixed(num_prompts, subject.shape.vocab_size, scale)
    result = head(
        "throughput",
        model=subject.described(),
        num_prompts=num_prompts,
        scale=scale,
        repeats=repeats,
        input_tokens=workload.input_tokens,
        output_tokens=workload.output_tokens,
        method="one generate call, output tokens over its time, median of the repeats; no prefix cache",
    )
    versions: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    starters = [ours(subject, [workload], facts)]
    if peer_name is not None:
        starters.append(peer(peer_name, subject, [workload], versions))
    [found] = compete(starters, [workload], _served, repeats=repeats, together=not subject.on_gpu)
    result |= {"engine": facts, "peers": versions}
    rates = {name: statistics.median(run.tokens_per_s for run in runs) for name, runs in found.items()}
    result |= {
        "tokens_per_s": rates[OURS],
        "tokens_per_s_each": [run.tokens_per_s for run in found[OURS]],
        "tokens_hash": tokens_hash(found[OURS][0].tokens),
        "measured_peers": {
            name: {"tokens_per_s": rate, "tokens_per_s_ratio": rates[OURS] / rate}
            for name, rate in rates.items()
            if name != OURS
        },
        "peer_figures": throughput_figures(figures or {}, subject.name, num_prompts, scale),
    }
    result["checks"] = [check_tokens(subject, workload, [("throughput", found[OURS][0].tokens)])]
    return result


def throughput_tables(result: Mapping[str, Any]) -> RenderableType:
    """The result as tables."""
    settings, mine = result["settings"], result["tokens_per_s"]
    figures = result["peer_figures"]
    rows = [(OURS, mine, None)]
    rows += [
        (name, found["tokens_per_s"], found["tokens_per_s_ratio"])
        for name, found in result["measured_peers"].items()
    ]
    rows += [
        (f"{name} (on file)", rate, mine / rate) for name, rate in figures.get("tokens_per_s", {}).items()
    ]
    rows += [(name, figures[name], mine / figures[name]) for name in ("target", "limit") if name in figures]
    title = (
        f"{settings['model']['name']}, {settings['num_prompts']} requests, "
        f"{settings['input_tokens']:,} tokens in, {settings['output_tokens']:,} out"
    )
    [run] = result["checks"][0]["runs"]
    verdict = "equal" if run["equal"] else "near ties only"
    return Group(
        make_table(title, ["", "output tokens/s", "ours over it"], rows),
        f"checked against mode none: {verdict}",
    )
