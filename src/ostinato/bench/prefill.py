"""`ostinato bench prefill`: prompt tokens per second, for one prompt and for a batch of prompts.

The time is that of one `generate` call with one token per answer: it includes reading the prompts and
sampling once.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType

from ..tools.results import head, make_table
from .check import check_tokens, tokens_hash
from .contest import OURS, Contestant, Run, compete, ours
from .peers.process import peer
from .subject import Subject
from .workload import Workload

LONGEST_CHECKED = 4096
"""In tokens. Checking a token needs the logits of its whole prompt, for which longer prompts lack memory."""


def bench_prefill(
    subject: Subject,
    *,
    input_lens: Sequence[int],
    batch_tokens: int,
    repeats: int,
    peer_name: str | None = None,
) -> dict[str, Any]:
    """For each length, one prompt and as many as fill `batch_tokens`; with a peer, both sides and their
    ratio."""
    vocab = subject.shape.vocab_size
    sizes = [
        (batch, length) for length in input_lens for batch in sorted({1, max(1, batch_tokens // length)})
    ]
    workloads = [Workload.uniform(batch, length, 1, vocab) for batch, length in sizes]
    result = head(
        "prefill",
        model=subject.described(),
        repeats=repeats,
        batch_tokens=batch_tokens,
        method="prompt tokens over the time of a generate call with one output token, median of the repeats; "
        "no prefix cache",
    )
    versions: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    starters = [ours(subject, workloads, facts)]
    if peer_name is not None:
        starters.append(peer(peer_name, subject, workloads, versions))
    measured = compete(starters, workloads, _served, repeats=repeats, together=not subject.on_gpu)
    result |= {"engine": facts, "peers": versions}
    result["rows"] = [_row(workload, found) for workload, found in zip(workloads, measured, strict=True)]
    result["checks"] = [
        check_tokens(subject, workload, [(str(workload), found[OURS][0].tokens)])
        for workload, found in zip(workloads, measured, strict=True)
        if workload.longest <= LONGEST_CHECKED + 1
    ]
    return result


def _served(contestant: Contestant, workload: Workload) -> Run:
    return contestant.run(workload)


def _row(workload: Workload, found: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    seconds = {name: statistics.median(run.seconds for run in runs) for name, runs in found.items()}
    rates = {name: workload.input_tokens / each for name, each in seconds.items()}
    return {
        "batch": len(workload),
        "input_len": len(workload.prompts[0]),
        "ms": seconds[OURS] * 1e3,
        "ms_each": [run.seconds * 1e3 for run in found[OURS]],
        "prompt_tokens_per_s": rates[OURS],
        "tokens_hash": tokens_hash(found[OURS][0].tokens),
        "measured_peers": {
            name: {
                "ms": seconds[name] * 1e3,
                "prompt_tokens_per_s": rate,
                "ratio": rates[OURS] / rate,
            }
            for name, rate in rates.items()
            if name != OURS
        },
    }


def prefill_tables(result: Mapping[str, Any]) -> RenderableType:
    """The result as tables."""
    model = result["settings"]["model"]
    peers = list(dict.fromkeys(name for row in result["rows"] for name in row["measured_peers"]))
    headings = ["prompts", "tokens each", "ms", "prompt tokens/s"]
    headings += [heading for name in peers for heading in (f"{name}, tokens/s", "ours over it")]
    rows = [
        [
            *(row["batch"], row["input_len"], row["ms"], row["prompt_tokens_per_s"]),
            *(
                row["measured_peers"].get(name, {}).get(key)
                for name in peers
                for key in ("prompt_tokens_per_s", "ratio")
            ),
        ]
        for row in result["rows"]
    ]
    runs = [run for check in result["checks"] for run in check["runs"]]
    verdict = f"checked against mode none: {sum(run['equal'] for run in runs)} of {len(runs)} runs equal"
    title = f"prefill of {model['name']}, {model['dtype']} on {model['device']}"
    return Group(make_table(title, headings, rows), f"{verdict}, the rest near ties")
