"""The commands behind the committed results exist, with the options and models that they name."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from ostinato.bench import SCRIPTS, run_h200
from ostinato.cli.main import app

ROOT = Path(__file__).parents[2]
RUN = vars(run_h200)


def script(file: str) -> dict[str, Any]:
    return vars(importlib.import_module(f"ostinato.bench.{file.removesuffix('.py')}"))


def test_every_benchmark_with_a_command_line_is_a_command() -> None:
    """Of `ostinato bench`, by its own name."""
    with_command_line = {
        file.stem.replace("_", "-")
        for file in Path(run_h200.__file__).parent.glob("*.py")
        if '__name__ == "__main__"' in file.read_text() and file.stem != "startup_process"
    }
    commands = typer.main.get_command(app).commands["bench"].commands  # type: ignore[attr-defined]
    assert with_command_line == set(SCRIPTS) <= set(commands)


def test_a_benchmark_reads_its_own_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        typer.main.get_command(app).main(["bench", "run-h200", "--list"])
    assert not ended.value.code
    assert "ostinato bench decode --model" in capsys.readouterr().out


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_the_pages_name_benchmarks_that_there_are(page: Path) -> None:
    named = re.findall(r"ostinato\.bench\.([a-z]\w*)|(?<!/)\bbench/(\w+)\.py", page.read_text())
    missing = [
        name
        for pair in named
        for name in pair
        if name and not Path(run_h200.__file__).with_name(f"{name}.py").is_file()
    ]
    assert not missing


def commands_of(file: str) -> dict[str, str]:
    return {f"{file}: {benchmark.name}": benchmark.command for benchmark in script(file)["BENCHMARKS"]}


COMMANDS = commands_of("run_h200.py") | commands_of("run_cpu.py")


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_are_understood(name: str) -> None:
    command, *arguments = COMMANDS[name].split()
    commands = typer.main.get_command(app)
    found = commands.commands["bench"].commands[command]  # type: ignore[attr-defined]
    context = found.make_context(command, [*arguments, "--json", "x.json"])
    assert "run_cpu" in name or (ROOT / context.params["model"] / "config.json").is_file()
    assert str(context.params["json_file"]) == "x.json"


def test_what_is_computed_is_computed_from_the_committed_results() -> None:
    """And belongs to them: among few requests a token takes what a plain step does."""
    found = script("chunk_simulation.py")
    rows = json.loads((ROOT / "benchmarks/results/chunk-simulation.json").read_text())["rows"]
    for model in found["KV_BYTES"]:
        costs = found["costs_of"](model)
        assert min(costs.step, costs.token, costs.pair, costs.context) > 0
        steps = [row["tpot_ms"]["p50"] for row in rows if row["model"] == model and "tpot_ms" in row]
        assert costs.step < min(steps) < 1.1 * costs.step


def test_what_would_not_end_within_the_budget_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main, started = RUN["main"], []

    def run(benchmark: Any, *_: object) -> bool:
        started.append(benchmark.name)
        return True

    monkeypatch.setitem(main.__globals__, "_run", run)
    assert main(RUN["BENCHMARKS"], "x", tmp_path, [], budget=42) == 0
    assert started == [each.name for each in RUN["BENCHMARKS"] if each.seconds <= 41 and not each.needs]
    assert "decode-context-qwen3-0.6b (no time)" in capsys.readouterr().out
