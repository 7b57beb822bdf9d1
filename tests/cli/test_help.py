"""What the command says about itself: complete at 80 columns, with defaults, at once."""

import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from ostinato import __version__
from ostinato.cli.main import app

COMMANDS = ["generate", "chat", "serve", "verify", "tune", "bench decode", "bench serving", "bench http"]


def helped(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_80_columns_and_cuts_nothing(command: str, flag: str) -> None:
    text = helped(*command.split(), flag)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "..." not in text.replace("N,N,...", "").replace("[ARGS]...", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_stands_whole_in_the_help(command: str) -> None:
    found = typer.main.get_command(app)
    for part in command.split():
        found = found.commands[part]  # type: ignore[attr-defined]
    words = set(re.findall(r"--[\w-]+", helped(*command.split(), "-h")))
    flags = {flag for param in found.params for flag in param.opts if flag.startswith("--")}
    assert flags <= words


def test_defaults_are_shown() -> None:
    text = " ".join(helped("serve", "-h").split())
    for flag, default in [
        ("--mem-fraction", "0.9"),
        ("--port", "8000"),
        ("--enable-prefix-caching", "on"),
        ("--disable-cuda-graph", "off"),
        ("--cuda-graph-mode", "auto"),
    ]:
        described = text.split(f"{flag} ", 1)[1].split(" --", 1)[0] + text.split(f"{flag} ", 1)[1][:600]
        assert f"[default: {default}]" in described, flag
    assert "[also: --gpu-memory-utilization, --mem-fraction-static]" in text


@pytest.mark.parametrize(
    ("command", "flag", "default"),
    [
        ("generate", "--temperature", "0.0"),
        ("generate", "--max-tokens", "256"),
        ("generate", "--top-p", "the model's own"),
        ("generate", "--min-tokens", "0"),
        ("chat", "--temperature", "the model's own"),
        ("chat", "--max-tokens", "the model's own, or 1024"),
    ],
)
def test_defaults_of_sampling_are_those_of_the_command(command: str, flag: str, default: str) -> None:
    text = " ".join(helped(command, "-h").split())
    described = text.split(f"{flag} <", 1)[1].split(" --", 1)[0]
    assert re.findall(r"\[default: (.*?)\]", described) == [default]


@pytest.mark.parametrize("argument", ["--version", "version"])
def test_the_version(argument: str) -> None:
    assert helped(argument) == f"ostinato {__version__}\n"


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; sys.argv = ['ostinato', 'serve', '-h']\n"
        "from ostinato.cli.main import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "--mem-fraction" in result.stdout
    assert "AssertionError" not in result.stderr
