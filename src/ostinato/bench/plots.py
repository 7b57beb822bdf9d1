"""Results as plots, from their JSON; measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..tools.results import BenchError, read_json
from .host import PARTS
from .startup import graph_mib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHADES = ("#f2b5a7", "#e07a5f", "#c8452f", "#8c2f1f", "#5a1d12", "#2b0d08")
_PARTS = {"schedule": "#c8452f", "launch": "#e9a18f", "complete": "#4f6d7a", "deliver": "#a3b1bb"}
_PHASES = (
    *("#2f3e46", "#7a8b99", "#a3b1bb", "#d9dfe3", "#5a1d12", "#c8452f"),
    *("#e07a5f", "#f2b5a7", "#e9c46a", "#f4e3b5", "#8ab17d", "#babb74"),
)
_OURS, _OTHERS = "#c8452f", ("#7a8b99", "#4f6d7a", "#a3b1bb", "#2f3e46")


def write_plot(result: Mapping[str, Any], file: Path) -> None:
    """Plot a result to a PNG."""
    draw = _DRAWINGS.get(result["benchmark"])
    if draw is None:
        raise BenchError(
            f"results of {result['benchmark']!r} cannot be plotted, only those of {', '.join(_DRAWINGS)}"
        )
    figure = draw(result)
    figure.suptitle(_title(result), fontsize=10)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150, bbox_inches="tight")


def write_plots(files: Sequence[Path], folder: Path) -> list[Path]:
    """Plot result files into `folder`, each under its own name; returns the plots' paths."""
    pictures = []
    for file in files:
        picture = folder / f"{file.stem}.png"
        write_plot(read_json(file), picture)
        pictures.append(picture)
    return pictures


def require_matplotlib() -> None:
    """Raises BenchError, with what to install, if matplotlib is missing: before measuring, not after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BenchError(
            "plots need matplotlib, which is not installed: pip install -e '.[plots]' in Ostinato's folder"
        ) from error


def check_picture(file: Path) -> None:
    """BenchError if no picture can be drawn into this file, by its name."""
    require_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    if file.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise BenchError(f"{file} is no picture by its name: end it in .png")


def _axes(count: int) -> tuple[Figure, list[Axes]]:
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.2 * count, 4.2), layout="constrained")
    found = figure.subplots(1, count, squeeze=False)
    for axes in found[0]:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    return figure, list(found[0])


def _title(result: Mapping[str, Any]) -> str:
    machine, model = result["machine"], result["settings"]["model"]
    place = machine.get("gpu") if model["device"] == "cuda" else f"{machine['cpu']}, {machine['cores']} cores"
    return f"{model['name']}, {model['dtype']}, {place}, torch {machine['torch']}, {machine['date']}"


def _sizes(axes: Axes, values: Sequence[int], label: str) -> None:
    """A logarithmic axis with a tick at every measured size."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(values), [str(value) for value in values])
    axes.minorticks_off()
    axes.set_xlabel(label)


def _decode(result: Mapping[str, Any]) -> Figure:
    rows = result["rows"]
    shortest = min(row["input_len"] for row in rows)
    lengths = sorted({row["input_len"] for row in rows})
    figure, axes = _axes(2 if len(lengths) > 1 else 1)
    _tpot_by_batch(axes[0], [row for row in rows if row["input_len"] == shortest], shortest)
    if len(lengths) > 1:
        _tpot_by_context(axes[1], rows, lengths)
    return figure


def _tpot_by_context(axes: Axes, rows: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> None:
    batches = sorted({row["batch"] for row in rows})
    for batch, color in zip(batches, _SHADES, strict=False):
        same = [row for row in rows if row["batch"] == batch]
        at = [row["input_len"] for row in same]
        axes.plot(at, [row["tpot_ms"] for row in same], marker="o", color=color, label=f"batch {batch}")
        axes.plot(at, [row["limit_ms"] for row in same], color=color, ls=":")
    axes.plot([], [], color="black", ls=":", label="limit of the memory")
    _sizes(axes, lengths, "prompt, tokens")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("TPOT, ms")
    axes.legend(frameon=False)


def _tpot_by_batch(axes: Axes, rows: Sequence[Mapping[str, Any]], input_len: int) -> None:
    batches = [row["batch"] for row in rows]
    axes.plot(batches, [row["tpot_ms"] for row in rows], marker="o", color=_OURS, label="ostinato")
    axes.plot(batches, [row["limit_ms"] for row in rows], color="black", ls=":", label="limit of the memory")
    for name, color in zip(_peer_names(rows), _OTHERS, strict=False):
        points = [(row["batch"], tpot) for row in rows if (tpot := _peer_tpot(row, name)) is not None]
        axes.plot(*zip(*points, strict=True), marker="s", ms=4, color=color, label=name)
    _sizes(axes, batches, f"batch ({input_len} tokens of prompt)")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("TPOT, ms")
    axes.legend(frameon=False)


def _peer_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(
        dict.fromkeys(
            name for row in rows for name in (*row["peer_figures"].get("tpot_ms", {}), *row["measured_peers"])
        )
    )


def _peer_tpot(row: Mapping[str, Any], name: str) -> float | None:
    if name in row["measured_peers"]:
        tpot: float = row["measured_peers"][name]["tpot_ms"]
        return tpot
    return row["peer_figures"].get("tpot_ms", {}).get(name)  # type: ignore[no-any-return]


def _prefill(result: Mapping[str, Any]) -> Figure:
    rows = result["rows"]
    figure, axes = _axes(2)
    for place, (singly, label) in zip(
        axes, ((True, "one prompt"), (False, "a batch of prompts")), strict=True
    ):
        shown = [row for row in rows if (row["batch"] == 1) == singly]
        if not shown:  # every batch is a single prompt
            place.set_visible(False)
            continue
        lengths = [row["input_len"] for row in shown]
        rates = [row["prompt_tokens_per_s"] for row in shown]
        place.plot(lengths, rates, marker="o", color=_OURS, label="ostinato")
        for name, color in zip(shown[0]["measured_peers"], _OTHERS, strict=False):
            others = [row["measured_peers"].get(name, {}).get("prompt_tokens_per_s") for row in shown]
            place.plot(lengths, others, marker="s", ms=4, color=color, label=name)
        _sizes(place, lengths, f"tokens of a prompt, {label}")
        place.set_ylim(bottom=0)
        place.yaxis.set_major_formatter("{x:,.0f}")
        place.set_ylabel("prompt tokens per second")
        place.legend(frameon=False)
    return figure


def _throughput(result: Mapping[str, Any]) -> Figure:
    figure, [axes] = _axes(1)
    bars = {"ostinato": result["tokens_per_s"]}
    bars |= result["peer_figures"].get("tokens_per_s", {})
    bars |= {name: found["tokens_per_s"] for name, found in result["measured_peers"].items()}
    colors = [_OURS, *([_OTHERS[0]] * (len(bars) - 1))]
    drawn = axes.barh(list(bars), list(bars.values()), color=colors)
    axes.bar_label(drawn, fmt="{:,.0f}", padding=3)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xlabel(f"output tokens per second, {result['settings']['num_prompts']} requests")
    return figure


def _host(result: Mapping[str, Any]) -> Figure:
    rows = result["rows"]
    batches = [row["batch"] for row in rows]
    is_on_gpu = rows[0].get("idle_share") is not None
    figure, axes = _axes(2 if is_on_gpu else 1)
    # On a CPU waiting and computing are part of the launch: the rest is the host's work.
    shown = [part for part in PARTS if part != "wait" and (part != "launch" or is_on_gpu)]
    heights = [[row["us"][part] for row in rows] for part in shown]
    axes[0].stackplot(batches, heights, labels=shown, colors=[_PARTS[part] for part in shown])
    _sizes(axes[0], batches, "batch")
    axes[0].set_ylabel("CPU time of a steady decode step, us")
    axes[0].legend(frameon=False, loc="upper left")
    if is_on_gpu:
        for key, label, color in (
            ("idle_share", "between steps, by the device's clock", _OURS),
            ("profiled_idle_share", "and between kernels, under the profiler", _OTHERS[1]),
        ):
            shares = [100 * row.get(key, float("nan")) for row in rows]
            axes[1].plot(batches, shares, marker="o", ms=4, color=color, label=label)
        axes[1].set_ylim(bottom=0)
        _sizes(axes[1], batches, "batch")
        axes[1].set_ylabel("device idle, per cent")
        axes[1].legend(frameon=False)
    return figure


def _startup(result: Mapping[str, Any]) -> Figure:
    if not result["ladders"]:
        figure, [axes] = _axes(1)
        _start_bars(axes, result)
        return figure
    figure, [bars, seconds, mebibytes] = _axes(3)
    _start_bars(bars, result)
    for kind, color in (("decode", _OURS), ("prefill", _OTHERS[1])):
        rows = [row for row in result["ladders"] if row["kind"] == kind]
        numbers = [row["rungs"] for row in rows]
        times = [row["startup_s"].get(f"capture {kind}") for row in rows]
        seconds.plot(numbers, times, marker="o", color=color, label=kind)
        mebibytes.plot(numbers, [graph_mib(row) for row in rows], marker="o", color=color, label=kind)
    for axes, label in ((seconds, "capture, s"), (mebibytes, "graph memory, MiB")):
        axes.set_xticks(sorted({row["rungs"] for row in result["ladders"]}))
        axes.set_xlabel("number of rungs")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    return figure


def _start_bars(axes: Axes, result: Mapping[str, Any]) -> None:
    found = {name: _phases(result[name]) for name in ("cold", "warm")}
    left = dict.fromkeys(found, 0.0)
    for phase, color in zip(found["warm"], _PHASES, strict=False):
        widths = [phases.get(phase, 0.0) for phases in found.values()]
        axes.barh(list(left), widths, left=list(left.values()), label=phase, color=color)
        left = {name: begin + width for (name, begin), width in zip(left.items(), widths, strict=True)}
    axes.invert_yaxis()
    axes.grid(visible=False)
    for name, total in left.items():
        axes.annotate(f"{total:.1f} s", (total, name), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, 1.12 * max(left.values()))
    axes.set_xlabel("seconds from the start of the process to the first token")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, fontsize=8)


def _phases(started: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by phase, with the engine's own phases in place of the whole engine."""
    found: dict[str, float] = {}
    for phase, seconds in started["seconds"].items():
        if phase == "engine":
            inside = {name: value for name, value in started["startup_s"].items() if name != "total"}
            found |= {**inside, "rest of the engine": seconds - sum(inside.values())}
        elif phase != "total":
            found[phase] = seconds
    return found


def _on_off(result: Mapping[str, Any]) -> Figure:
    rows = result["rows"]
    figure, [axes] = _axes(1)
    places = range(len(rows))
    for offset, side, color in ((-0.2, "off", _OTHERS[0]), (0.2, "on", _OURS)):
        heights = [row[f"tpot_ms_{side}"] for row in rows]
        drawn = axes.bar([at + offset for at in places], heights, 0.4, color=color, label=f"graphs {side}")
        axes.bar_label(drawn, fmt="{:.3g}", padding=2, fontsize=8)
    labels = [f"{row['batch']}\n{row['gain']:.1f}x" for row in rows]
    axes.set_xticks(list(places), labels)
    axes.set_xlabel("batch, and how many times faster with graphs")
    axes.set_ylabel("TPOT, ms")
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return figure


_DRAWINGS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "decode": _decode,
    "prefill": _prefill,
    "throughput": _throughput,
    "host": _host,
    "startup": _startup,
    "graphs-on-off": _on_off,
}
