"""`ostinato bench host`: the CPU cost of a steady decode step, and whether the device ever waits for it.

Note [Steady steps]
Prompts are short enough to be prefilled in one step, so all but the first steps of a run only decode, with a
new page every 16 tokens. Each step is timed separately, from its beginning to that of the next
(`StepClock.recording`); a few at both ends are left out. Figures are medians over the steps of all repeats:
over steps, not runs, because the difference of two runs contains the noise of two prefills. Means are
reported too.

Note [The device's clock]
The first and the last kernel of a decode step (the last one returns its tokens) read the GPU's own clock, and
the times arrive with the tokens. The device was idle from the end of one step to the beginning of the next.
Reading the clock costs nothing, so this is measured in normal operation. The profiler slows the host down:
its idle time (Note [Idle time] in kernel_timeline), from a separate run, is reported too because it shows
gaps inside a step; it is too large where the profiler's own work makes the device wait.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType

from ostinato.engine.stepping.times import OneStep

from ..tools.results import BenchError, head, make_table, share, tell
from .check import STEPS, checked_part, compare_with
from .contest import Ours
from .engine_facts import engine_facts
from .kernel_timeline import Timeline, idle_time, timeline_of
from .made_up_tokenizer import with_text
from .subject import WITHOUT_GRAPHS, Subject
from .workload import Workload

PROMPT_LEN = 8
"""512 prompts of this length are one prefill step of 4096 tokens."""
PROFILED_STEPS = 50
"""Number of steps under the profiler."""
PARTS = ("schedule", "launch", "wait", "complete", "deliver")
"""The parts of a step, see `LLM.step_times`."""


ENDS = 4
"""Steps left out at each end of a run, where rows join and leave."""


_ON_CPU = "on a CPU the launch is the computation: idle time and launches need a GPU"


def bench_host(
    subject: Subject, *, batch_sizes: Sequence[int], output_len: int, repeats: int
) -> dict[str, Any]:
    """CPU microseconds per step by part, by batch size; on a GPU idle time and launches too."""
    vocab = subject.shape.vocab_size
    workloads = [Workload.uniform(batch, PROMPT_LEN, output_len, vocab) for batch in batch_sizes]
    with with_text(subject) as (speaking, tokenizer):
        result = head(
            "host",
            model=subject.described(),
            output_len=output_len,
            repeats=repeats,
            prompt_len=PROMPT_LEN,
            tokenizer=tokenizer,
            method=(
                "medians over single steps that only decode; idle_share: from the end of a step to the "
                "beginning of the next, by the device's clock; profiled: time without a kernel or copy, as a "
                "share of the time from the first to the last one, under the profiler, over the last "
                f"{PROFILED_STEPS} steps; between: of it, gaps between different launches; waiting: of that, "
                "until the host had launched what comes next"
            ),
        )
        batch, length = max(batch_sizes), PROMPT_LEN + output_len + 1
        with speaking.start(batch, length) as llm:
            engine = Ours(llm, detokenize=True)
            # Before the profiler is used, which was seen to slow down launches for the rest of the process.
            rows = [_by_part(engine, workload, repeats) for workload in workloads]
            if subject.on_gpu:
                rows = [
                    row | _on_device(engine, workload) for row, workload in zip(rows, workloads, strict=True)
                ]
            result["rows"] = rows
            tokens = {len(each): engine.run(each.shortened(STEPS)).tokens for each in workloads}
            result["engine"] = engine_facts(llm)
        with speaking.start(batch, length, **WITHOUT_GRAPHS) as llm:
            runs = [(f"batch {size}", found) for size, found in tokens.items()]
            part = checked_part(max(workloads, key=len))
            result["checks"] = [compare_with(llm, subject, part, runs)]
            if subject.on_gpu:
                result["launches_without_graphs"] = _launches_of_ends(Ours(llm, detokenize=True), workloads)
    return result


def _by_part(engine: Ours, workload: Workload, repeats: int) -> dict[str, Any]:
    tell(str(workload))
    engine.run(workload.shortened(2))
    engine.llm.step_times(reset=True)
    steps = [step for _ in range(repeats) for step in _steady(engine, workload)]
    on_device = engine.llm.step_times()
    microseconds = {part: statistics.median(step.parts[part] for step in steps) for part in PARTS}
    means = {part: statistics.fmean(step.parts[part] for step in steps) for part in PARTS}
    # Of whole steps, so that parts of different steps are not mixed.
    busy = statistics.median(1 - step.parts["wait"] / step.microseconds for step in steps)
    return {
        "batch": len(workload),
        "steps": len(steps),
        "step_us": statistics.median(step.microseconds for step in steps),
        "mean_step_us": statistics.fmean(step.microseconds for step in steps),
        "us": microseconds,
        "mean_us": means,
        "schedule_and_launch_us": microseconds["schedule"] + microseconds["launch"],
        "host_busy_share": busy,
        "idle_share": on_device.idle_share if on_device.device_microseconds else None,
        "output_tokens_per_s": len(workload) / (means["complete"] + means["deliver"]) * 1e6,
    }


def _steady(engine: Ours, workload: Workload) -> list[OneStep]:
    """The steps of one run that only decode."""
    with engine.llm.engine.core.clock.recording() as steps:
        engine.run(workload)
    steady = steps[ENDS:-ENDS]
    if not steady:
        raise BenchError(f"{max(workload.output_lens)} tokens are too few for steady steps: more than 10")
    return steady


def _profiled(engine: Ours, workload: Workload) -> tuple[Timeline, Timeline, int]:
    """Timelines of a run of one token and of a long run, and by how many steps they differ."""
    llm, longer = engine.llm, workload.shortened(PROFILED_STEPS + 8)
    llm.step_times(reset=True)
    first = timeline_of(lambda: engine.run(workload.shortened(1)))
    before = llm.step_times(reset=True).steps
    whole = timeline_of(lambda: engine.run(longer))
    return first, whole, llm.step_times(reset=True).steps - before


def _launches_per_step(first: Timeline, whole: Timeline, steps: int) -> dict[str, float]:
    kinds = whole.launches.keys() | first.launches.keys()
    return {
        kind: (whole.launches.get(kind, 0) - first.launches.get(kind, 0)) / steps for kind in sorted(kinds)
    }


def _on_device(engine: Ours, workload: Workload) -> dict[str, Any]:
    first, whole, steps = _profiled(engine, workload)
    if not whole.events:
        return {}
    launches = (whole.num_launches - first.num_launches) / steps
    shown = min(PROFILED_STEPS, steps)
    idle = idle_time(whole.last_launches(round(launches * shown)), whole.launched_at)
    return {
        "profiled_idle_share": idle.share,
        "profiled_idle_share_between_launches": idle.share_between,
        "profiled_idle_share_waiting": idle.share_waiting,
        "profiled_step_us": idle.window / shown,
        "profiled_device_us": (idle.window - idle.between) / shown,
        "launches_per_step": _launches_per_step(first, whole, steps),
        "device_events_per_step": (len(whole.events) - len(first.events)) / steps,
    }


def _launches_of_ends(engine: Ours, workloads: Sequence[Workload]) -> list[dict[str, Any]]:
    """Launches per step of the smallest and the largest batch."""
    by_size = {len(workload): workload for workload in workloads}
    found = []
    for size in sorted({min(by_size), max(by_size)}):
        engine.run(by_size[size].shortened(2))
        launches = _launches_per_step(*_profiled(engine, by_size[size]))
        found.append({"batch": size, "launches_per_step": launches})
    return found


def host_tables(result: Mapping[str, Any]) -> RenderableType:
    """The result as tables."""
    model = result["settings"]["model"]
    headings = ["batch", "step", *PARTS, "schedule+launch", "host busy", "output tokens/s", "device idle"]
    rows = [
        [
            *(row["batch"], row["step_us"], *(row["us"][part] for part in PARTS)),
            *(row["schedule_and_launch_us"], share(row["host_busy_share"])),
            *(row["output_tokens_per_s"], None if row["idle_share"] is None else share(row["idle_share"])),
        ]
        for row in result["rows"]
    ]
    title = f"steady decode of {model['name']} on {model['device']}, CPU microseconds per step"
    tables: list[RenderableType] = [make_table(title, headings, rows)]
    on_device = [row for row in result["rows"] if "profiled_idle_share" in row]
    if on_device:
        kinds = ("graph", "kernel", "copy")
        off = {row["batch"]: row["launches_per_step"] for row in result["launches_without_graphs"]}
        headings = ["batch", "device us", "idle, waiting", "idle, between launches", "idle, in all", *kinds]
        headings.append("kernels without graphs")
        rows = [
            [
                *(row["batch"], row["profiled_device_us"]),
                *(
                    share(row[f"profiled_idle_share{which}"])
                    for which in ("_waiting", "_between_launches", "")
                ),
                *(row["launches_per_step"].get(kind, 0.0) for kind in kinds),
                off.get(row["batch"], {}).get("kernel"),
            ]
            for row in on_device
        ]
        tables.append(make_table("under the profiler, and launches per step", headings, rows))
    else:
        why = (
            "the profiler saw nothing: it may need more permissions" if model["device"] == "cuda" else _ON_CPU
        )
        tables.append(why)
    return Group(*tables)
