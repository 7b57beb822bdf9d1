"""The commands behind the committed GPU results exist, with the options and models that they name."""

import runpy
from pathlib import Path

import pytest
import typer

from ostinato.cli.bench import app

ROOT = Path(__file__).parents[2]
COMMANDS = runpy.run_path(str(ROOT / "benchmarks" / "run_h200.py"))["COMMANDS"]


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_are_understood(name: str) -> None:
    command, *arguments = COMMANDS[name].split()
    group = typer.main.get_command(app)
    found = group.commands[command]  # type: ignore[attr-defined]
    context = found.make_context(command, [*arguments, "--json", "x.json"])
    assert (ROOT / context.params["model"] / "config.json").is_file()
    assert str(context.params["json_file"]) == "x.json"
