"""Lint, types and documentation are part of the test command."""

import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_module(*command: str) -> None:
    if shutil.which(command[0], path=str(Path(sys.executable).parent)) is None:
        pytest.skip(f"{command[0]} is not installed here")
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_ruff_finds_nothing() -> None:
    run_module("ruff", "check", "src", "tests")


def test_code_is_formatted() -> None:
    run_module("ruff", "format", "--check", "src", "tests")


@pytest.mark.timeout(300)
def test_types_are_right() -> None:
    run_module("mypy")


def test_every_public_name_is_documented() -> None:
    import ostinato.graphs as graphs

    undocumented = []
    for name in graphs.__all__:
        thing = getattr(graphs, name)
        if not inspect.getdoc(thing):
            undocumented.append(name)
        if inspect.isclass(thing) and thing.__module__.startswith("ostinato"):
            undocumented += [
                f"{name}.{attribute}"
                for attribute, value in vars(thing).items()
                if not attribute.startswith("_")
                and (inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod))
                and not inspect.getdoc(
                    getattr(thing, attribute) if not isinstance(value, property) else value
                )
            ]
    assert not undocumented


def test_the_project_names_no_machine_of_its_makers() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode != 0:
        pytest.skip("not a git checkout")
    forbidden = ("/" + "work/", "/" + "root/", "/" + "opt/torch")
    for name in files.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".json", ".txt", ""} and path.is_file():
            text = path.read_text(errors="ignore")
            assert not any(word in text for word in forbidden), name
