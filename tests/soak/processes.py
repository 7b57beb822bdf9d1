"""The processes of a server, watched for hours: memory, descriptors, threads, and what became of them."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")
MOST_MIB_PER_MINUTE = 0.1
ROLES = {
    "multiprocessing.spawn": "engine",
    "multiprocessing.resource_tracker": "resource tracker",
    "ostinato.grammars": "grammars",
    "text_work": "texts",
    "ostinato.server.guard": "guard",
}


@dataclass(frozen=True)
class Member:
    """One process at one moment."""

    role: str
    process: int
    began: int
    """Clock ticks since the machine's start: tells a process from a later one with its number."""
    resident_mib: float
    own_mib: float
    """Anonymous and shared memory in use or swapped out, each page divided by the processes that have it."""
    descriptors: int
    threads: int
    seconds: float
    """Of a core, those of ended children included."""


def group(root: int) -> list[Member]:
    """Returns the process and everything below it."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents.setdefault(int(_stat(int(folder.name))[1]), []).append(int(folder.name))
    found, waiting = [], [root]
    while waiting:
        process = waiting.pop()
        waiting += parents.get(process, [])
        with contextlib.suppress(OSError, ValueError):
            found.append(_member(process, root))
    return found


def _stat(process: int) -> list[str]:
    """The fields behind the name."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def _member(process: int, root: int) -> Member:
    place, fields = Path(f"/proc/{process}"), _stat(process)
    sizes = {
        name: int(rest.split()[0]) / 1024
        for name, _, rest in (
            line.partition(":") for line in (place / "smaps_rollup").read_text().splitlines()[1:]
        )
    }
    own = sizes["Pss_Anon"] + sizes["Pss_Shmem"] + sizes["SwapPss"]
    return Member(
        role=_role(process, root, parent=int(fields[1])),
        process=process,
        began=int(fields[19]),
        resident_mib=round(sizes["Rss"], 3),
        own_mib=round(own, 3),
        descriptors=len(list((place / "fd").iterdir())),
        threads=int(fields[17]),
        seconds=sum(map(int, fields[11:15])) / TICKS,
    )


def _role(process: int, root: int, parent: int) -> str:
    if process == root:
        return "http"
    command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    role = next((role for mark, role in ROLES.items() if mark in command), "other")
    if role == "grammars" and "ostinato.grammars" in Path(f"/proc/{parent}/cmdline").read_text():
        return "grammar processes"
    return role


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Returns the median of the slopes between all pairs (Theil and Sen): single outliers do not move it."""
    points = zip(times, values, strict=True)
    return statistics.median((y - x) / (t - s) for (s, x), (t, y) in combinations(points, 2))


def judged(samples: Sequence[dict[str, Any]], warm_up: float) -> dict[str, Any]:
    """Returns what samples of a soak prove: {"seconds", "members"} each; `warm_up` seconds do not count.

    Every process that was there all the time is judged on its own, and so are all together.
    """
    counted = [sample for sample in samples if sample["seconds"] >= warm_up]
    if len(counted) < 3:
        return {"passed": False, "why": ["too short: fewer than three samples after the warm-up"]}
    minutes = [sample["seconds"] / 60 for sample in counted]
    by_process = [
        {(member["process"], member["began"]): member for member in sample["members"]} for sample in counted
    ]
    lasting = set(by_process[0]).intersection(*by_process[1:])
    total = [sum(member["own_mib"] for member in sample.values()) for sample in by_process]
    why, processes = [], {}
    for key in sorted(lasting):
        series = [sample[key] for sample in by_process]
        rise = slope(minutes, [member["own_mib"] for member in series])
        role = series[0]["role"]
        name = role if role not in processes else f"{role} {key[0]}"
        processes[name] = {
            "mib_per_minute": round(rise, 4),
            "own_mib": [series[0]["own_mib"], series[-1]["own_mib"]],
            "resident_mib": [series[0]["resident_mib"], series[-1]["resident_mib"]],
        }
        if rise >= MOST_MIB_PER_MINUTE:
            why.append(f"{name}: memory grows by {rise:.3f} MiB a minute")
        for what in ("descriptors", "threads"):
            numbers = [member[what] for member in series]
            processes[name][what] = [min(numbers), max(numbers)]
            third = len(numbers) // 3
            if max(numbers[-third:]) > max(numbers[:third]):
                why.append(f"{name}: {what} grew from {max(numbers[:third])} to {max(numbers[-third:])}")
    rise = slope(minutes, total)
    if rise >= MOST_MIB_PER_MINUTE:
        why.append(f"all together: memory grows by {rise:.3f} MiB a minute")
    for role in ("http", "engine"):
        if role not in processes:
            why.append(f"{role}: the process did not last")
    return {
        "passed": not why,
        "why": why,
        "mib_per_minute": round(rise, 4),
        "own_mib": [round(total[0], 2), round(total[-1], 2)],
        "processes_at_a_time": [min(map(len, by_process)), max(map(len, by_process))],
        "processes": processes,
    }
