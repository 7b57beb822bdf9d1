"""The names that `ostinato.graphs` shows: one table, and imports that say the same to type checkers."""

import ast
import inspect
import subprocess
import sys

import pytest

import ostinato
from ostinato import graphs


def imports_for_type_checkers() -> set[tuple[str, str]]:
    """(module, name) of what is imported under TYPE_CHECKING, each in the form that makes it public."""
    [block] = [node for node in ast.parse(inspect.getsource(graphs)).body if isinstance(node, ast.If)]
    found = set()
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom)
        assert statement.level == 1
        for alias in statement.names:
            assert alias.name == alias.asname, f"{alias.name} would be private to a strict type checker"
            found.add((str(statement.module), alias.name))
    return found


def test_type_checkers_see_the_same_names() -> None:
    assert imports_for_type_checkers() == {(home, name) for name, home in graphs._HOMES.items()}


def test_every_public_name_can_be_imported_and_is_listed() -> None:
    everything: dict[str, object] = {}
    exec("from ostinato.graphs import *", everything)
    for name in graphs.__all__:
        assert everything[name] is getattr(graphs, name) is getattr(ostinato, name)
        assert name in dir(graphs)
    assert len(set(graphs.__all__)) == len(" ".join(graphs._PUBLIC.values()).split()), "a name has two homes"
    assert "import_module" not in everything


def test_names_are_listed_before_they_are_imported_and_errors_need_no_torch() -> None:
    code = (
        "import sys\n"
        "from ostinato import graphs\n"
        "assert {'CudaGraphRunner', 'graphed', '__doc__'} <= {*dir(graphs)}\n"
        "from ostinato.graphs import ConfigError, Reason\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'ostinato\.graphs' has no attribute 'CudaGraph'"):
        graphs.CudaGraph  # noqa: B018
    with pytest.raises(ImportError, match="CudaGraph"):
        from ostinato.graphs import CudaGraph  # noqa: F401


def run_alone(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


BY_NAME = """
import ostinato
assert not hasattr(ostinato, 'x')
assert {'LLM', 'graphed', 'graphs', '__version__'} <= {*dir(ostinato)}
assert ostinato.graphs.graphed is ostinato.graphed
from ostinato import graphed
"""
BY_STAR = "from ostinato import *; LLM, SamplingParams, graphed, CudaGraphRunner, graphs"
IN_FORKS = """
import os, sys, torch
for code in sys.argv[1:]:
    child = os.fork()
    if not child:
        exec(code)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_the_package_shows_its_names_in_a_fresh_process() -> None:
    """Each in one of its own, which share the seconds that torch takes."""
    command = [sys.executable, "-c", IN_FORKS, BY_NAME, BY_STAR]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_names_of_the_package_are_listed_without_torch() -> None:
    code = "import sys, ostinato; dir(ostinato), hasattr(ostinato, 'x'); assert 'torch' not in sys.modules"
    result = run_alone(code)
    assert result.returncode == 0, result.stderr


def test_type_checkers_see_the_names_of_the_engine() -> None:
    [block] = [node for node in ast.parse(inspect.getsource(ostinato)).body if isinstance(node, ast.If)]
    imported = {
        (str(statement.module).removeprefix("engine."), alias.name)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom) and str(statement.module).startswith("engine")
        for alias in statement.names
    }
    assert imported == {(home, name) for name, home in ostinato._ENGINE.items()}


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'ostinato' has no attribute 'LLMs'"):
        ostinato.LLMs  # noqa: B018
    with pytest.raises(ImportError, match="LLMs"):
        from ostinato import LLMs  # noqa: F401
