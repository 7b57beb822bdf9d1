"""`ostinato bench decode`: time per output token, and how close it is to the limit set by memory.

TPOT = (T(N) - T(1)) / (N - 1), where T(n) is the time of one `generate` call with n tokens per answer: it
includes the whole engine but not prefill.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType

from ..tools.results import BenchError, head, make_table, share
from .check import check_tokens, tokens_hash
from .contest import OURS, Contestant, Run, compete, equal_share, ours
from .limits import read_rate, step_bytes
from .peer_figures import decode_figures
from .peers.process import peer
from .subject import Subject
from .workload import Workload


@dataclass(frozen=True)
class Decoded:
    """T(1) and T(N) of one workload."""

    first: Run
    whole: Run

    @property
    def tpot_ms(self) -> float:
        """Milliseconds per token after the first."""
        steps = len(self.whole.tokens[0]) - 1
        return (self.whole.seconds - self.first.seconds) / steps * 1e3


def decoded(contestant: Contestant, workload: Workload) -> Decoded:
    """Measure one workload once."""
    return Decoded(contestant.run(workload.shortened(1)), contestant.run(workload))


def bench_decode(
    subject: Subject,
    *,
    batch_sizes: Sequence[int],
    input_lens: Sequence[int],
    output_len: int,
    repeats: int,
    peer_name: str | None = None,
    figures: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """TPOT for each batch size and prompt length; with a peer, both sides and their ratio."""
    if output_len < 2:
        raise BenchError(f"output_len must be at least 2, not {output_len}: TPOT is a difference")
    workloads = [
        Workload.uniform(batch, input_len, output_len, subject.shape.vocab_size)
        for input_len in input_lens
        for batch in batch_sizes
    ]
    is_cached = subject.options.get("enable_prefix_caching", False)
    cached = "prompts from the prefix cache" if is_cached else "no prefix cache"
    result = head(
        "decode",
        model=subject.described(),
        output_len=output_len,
        repeats=repeats,
        method=f"TPOT = (T(N) - T(1)) / (N - 1), median of the repeats; greedy, {cached}",
    )
    versions: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    starters = [ours(subject, workloads, facts)]
    if peer_name is not None:
        starters.append(peer(peer_name, subject, workloads, versions))
    # On a GPU every engine takes most of the memory, so they cannot run at the same time.
    measured = compete(starters, workloads, decoded, repeats=repeats, together=not subject.on_gpu)
    rate, source = read_rate(subject.config.device)
    result["limit"] = {"tb_per_s": rate / 1e12, "from": source, "of": "weights once + KV at mean context"}
    result |= {"engine": facts, "peers": versions}
    result["rows"] = [
        _row(subject, workload, found, rate, figures or {})
        for workload, found in zip(workloads, measured, strict=True)
    ]
    result["checks"] = _checks(subject, workloads, measured, input_lens)
    return result


def _row(
    subject: Subject,
    workload: Workload,
    measured: Mapping[str, Sequence[Decoded]],
    rate: float,
    figures: Mapping[str, Any],
) -> dict[str, Any]:
    batch, input_len = len(workload), len(workload.prompts[0])
    output_len = workload.output_lens[0]
    ours_ = measured[OURS]
    tpot = statistics.median(run.tpot_ms for run in ours_)
    needed = step_bytes(subject.shape, subject.config.dtype, batch, input_len + output_len / 2)
    row: dict[str, Any] = {
        "batch": batch,
        "input_len": input_len,
        "tpot_ms": tpot,
        "tpot_ms_each": [run.tpot_ms for run in ours_],
        "first_token_ms": statistics.median(run.first.seconds for run in ours_) * 1e3,
        "tokens_per_s": statistics.median(run.whole.tokens_per_s for run in ours_),
        "tb_per_s": needed / (tpot / 1e3) / 1e12,
        "limit_ms": needed / rate * 1e3,
        "share_of_limit": needed / rate * 1e3 / tpot,
        "tokens_hash": tokens_hash(ours_[0].whole.tokens),
    }
    row["measured_peers"] = {
        name: _against(row, ours_, runs, not subject.has_random_weights)
        for name, runs in measured.items()
        if name != OURS
    }
    row["peer_figures"] = decode_figures(figures, subject.name, batch, input_len)
    return row


def _against(
    row: Mapping[str, Any], ours_: Sequence[Decoded], runs: Sequence[Decoded], same_weights: bool
) -> dict[str, Any]:
    tpot = statistics.median(run.tpot_ms for run in runs)
    rate = statistics.median(run.whole.tokens_per_s for run in runs)
    return {
        "tpot_ms": tpot,
        "first_token_ms": statistics.median(run.first.seconds for run in runs) * 1e3,
        "tokens_per_s": rate,
        "tpot_ratio": tpot / row["tpot_ms"],
        "tokens_per_s_ratio": row["tokens_per_s"] / rate,
        "equal_tokens": equal_share(ours_[0].whole, runs[0].whole) if same_weights else None,
    }


def _checks(
    subject: Subject,
    workloads: Sequence[Workload],
    measured: Sequence[Mapping[str, Sequence[Decoded]]],
    input_lens: Sequence[int],
) -> list[dict[str, Any]]:
    checks = []
    for input_len in input_lens:
        same = [
            (workload, found[OURS][0].whole.tokens)
            for workload, found in zip(workloads, measured, strict=True)
            if len(workload.prompts[0]) == input_len
        ]
        largest = max((workload for workload, _ in same), key=len)
        runs = [(f"batch {len(workload)}, input {input_len}", tokens) for workload, tokens in same]
        checks.append(check_tokens(subject, largest, runs))
    return checks


def decode_tables(result: Mapping[str, Any]) -> RenderableType:
    """The result as tables."""
    settings = result["settings"]
    model = settings["model"]
    title = f"{model['name']}, {model['dtype']} on {model['device']}, {settings['output_len']} tokens out"
    known = [
        *dict.fromkeys(name for row in result["rows"] for name in row["peer_figures"].get("tpot_ms", {}))
    ]
    headings = ["batch", "input", "TPOT ms", "tokens/s", "first ms", "TB/s", "limit ms", "of limit"]
    tables = [
        make_table(
            title,
            [*headings, *(f"{name} ms" for name in known), *(["target ms"] if known else [])],
            [
                [
                    *(row["batch"], row["input_len"], row["tpot_ms"], row["tokens_per_s"]),
                    *(row["first_token_ms"], row["tb_per_s"], row["limit_ms"], share(row["share_of_limit"])),
                    *(row["peer_figures"].get("tpot_ms", {}).get(name) for name in known),
                    *([row["peer_figures"].get("target_ms")] if known else []),
                ]
                for row in result["rows"]
            ],
        )
    ]
    against = [
        (
            row["batch"],
            row["input_len"],
            name,
            *(found[key] for key in _AGAINST),
            share(found["equal_tokens"]),
        )
        for row in result["rows"]
        for name, found in row["measured_peers"].items()
    ]
    if against:
        headings = ["batch", "input", "peer", *_AGAINST.values(), "equal tokens"]
        tables.append(make_table("in the same run; ratios above 1: ours is faster", headings, against))
    equal = sum(run["equal"] for check in result["checks"] for run in check["runs"])
    total = sum(len(check["runs"]) for check in result["checks"])
    return Group(*tables, f"checked against mode none: {equal} of {total} runs equal, the rest near ties")


_AGAINST = {
    "tpot_ms": "TPOT ms",
    "tokens_per_s": "tokens/s",
    "tpot_ratio": "ratio by TPOT",
    "tokens_per_s_ratio": "ratio by tokens/s",
}
