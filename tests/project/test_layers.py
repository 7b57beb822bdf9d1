"""Imports point right or down: cli -> bench -> tools, server -> engine -> models, cache -> kernels; memory ->
graphs; grammars -> text."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from ostinato.engine.vllm_api.module_paths import PATHS

PACKAGE = Path(__file__).parents[2] / "src" / "ostinato"

MAY_IMPORT = {
    "compat": {"compat", "engine"},
    "cli": {
        *("cli", "bench", "tools", "server", "engine", "models", "cache", "kernels"),
        *("graphs", "memory", "grammars", "text"),
    },
    "bench": {
        *("bench", "tools", "engine", "models", "cache", "kernels", "graphs", "memory", "grammars", "text"),
        *("LLM", "LoRARequest", "SamplingParams"),  # what users import
    },
    "tools": {"tools", "engine", "models", "cache", "kernels", "graphs", "memory", "grammars", "text"},
    "server": {"server", "engine", "models", "cache", "kernels", "graphs", "memory", "grammars", "text"},
    "engine": {"engine", "models", "cache", "kernels", "graphs", "memory", "grammars", "text"},
    "models": {"models", "kernels", "text"},
    "cache": {"cache", "kernels"},
    "kernels": {"kernels"},
    "graphs": {"graphs"},
    "memory": {"memory", "graphs"},
    "grammars": {"grammars", "text"},
    "text": {"text"},
}
OUTSIDE_PACKAGES_OF_GRAPHS = {"torch", "numpy", "rich", "cuda", "triton"}
ENTRY_POINTS = {"__init__", "__main__", "launch_server"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def imports_in(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """The import statements of a file, at any depth of its code."""

    def below(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield child
            elif not isinstance(child, ast.expr):  # no statement is inside an expression
                yield from below(child)

    return tuple(below(ast.parse(path.read_text())))


@cache
def imported_names(path: Path) -> set[str]:
    """Absolute dotted names of everything a module imports, at any depth of its code."""
    here = ["ostinato", *path.relative_to(PACKAGE).parts[:-1]]
    names: set[str] = set()
    for node in imports_in(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            base = here[: len(here) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            names |= {".".join([*module, alias.name]) for alias in node.names}
            if not node.level:
                names.add(".".join(module))
    return names


def layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def against_the_layers(path: Path) -> list[str]:
    """What is wrong with the place of a module, or with what it imports."""
    where = path.relative_to(PACKAGE)
    if path.parent == PACKAGE:
        is_known = path.stem in ENTRY_POINTS
        return [] if is_known else [f"{where}: a module at the top explains nothing; give it a layer"]
    allowed = {*MAY_IMPORT[layer(path)], "__version__"}
    ours = [name.split(".") for name in imported_names(path) if name.startswith("ostinato.")]
    return [f"{where} imports {'.'.join(parts)}" for parts in ours if parts[1] not in allowed]


def from_outside(folder: str, allowed: set[str]) -> set[str]:
    """What the modules of a folder import besides Python's own, our own, and these."""
    known = {"ostinato", *allowed, *sys.stdlib_module_names}
    files = sorted((PACKAGE / folder).rglob("*.py"))
    assert files
    found = {(path.name, name) for path in files for name in imported_names(path)}
    return {f"{file} imports {name}" for file, name in found if name.split(".")[0] not in known}


def test_imports_respect_the_layers() -> None:
    assert len(modules()) > 500
    assert not [wrong for path in modules() for wrong in against_the_layers(path)]


def test_the_runtime_needs_torch_and_nothing_of_ours() -> None:
    assert not from_outside("graphs", OUTSIDE_PACKAGES_OF_GRAPHS)


def test_the_memory_saver_needs_torch_and_the_driver_alone() -> None:
    assert not from_outside("memory", {"torch", "cuda"})


def module_name(path: Path) -> str:
    parts = ["ostinato", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def module_graph() -> dict[str, set[str]]:
    """Every module with those it imports, at any depth of its code; entry points at the top apart."""
    files = {module_name(path): path for path in modules() if path.parent != PACKAGE}

    def home(name: str) -> str:
        # What is imported may be a name inside a module.
        return name if name in files else name.rpartition(".")[0]

    return {
        module: {home(name) for name in imported_names(path) if home(name) in files} - {module}
        for module, path in files.items()
    }


def folder_graph(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same for folders; one inside another is a part of it."""
    found: dict[str, set[str]] = {}
    for module, imported in graph.items():
        here = module.rpartition(".")[0]
        there = {name.rpartition(".")[0] for name in imported}
        apart = {name for name in there if not f"{name}.".startswith(f"{here}.")}
        found.setdefault(here, set()).update(name for name in apart if not f"{here}.".startswith(f"{name}."))
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Every shortest way from a node back to itself."""
    found = []
    for start in graph:
        ways = {start: [start]}
        rest = [start]
        while rest:
            at = rest.pop(0)
            for following in sorted(graph.get(at, ())):
                if following == start:
                    found.append([*ways[at], start])
                    rest.clear()
                    break
                if following not in ways:
                    ways[following] = [*ways[at], following]
                    rest.append(following)
    return found


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks"])
def test_what_is_imported_from_the_package_exists(folder: str) -> None:
    # vLLM's module paths are a table, whose own test imports all of them.
    existing = (
        {module_name(path) for path in modules()} | {"ostinato"} | {f"ostinato.{path}" for path in PATHS}
    )
    root = PACKAGE.parents[1] / folder
    for path in root.rglob("*.py"):
        for node in imports_in(path):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module is not None:
                is_ours = node.module.split(".")[0] == "ostinato"
                assert not is_ours or node.module in existing, f"{path}: there is no {node.module}"


def test_no_module_imports_itself_in_a_circle() -> None:
    assert not circles(module_graph())


def test_no_folder_imports_itself_in_a_circle() -> None:
    assert not circles(folder_graph(module_graph()))


def test_a_circle_is_seen() -> None:
    graph = {
        "x.a.one": {"x.b.two"},
        "x.b.two": {"x.b.three"},
        "x.b.three": {"x.a.four"},
        "x.a.four": set[str](),
    }
    assert not circles(graph)
    assert ["x.a", "x.b", "x.a"] in circles(folder_graph(graph))
    graph["x.a.four"] = {"x.a.one"}
    assert ["x.a.one", "x.b.two", "x.b.three", "x.a.four", "x.a.one"] in circles(graph)


def test_a_wrong_arrow_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "ostinato"
    (package / "graphs").mkdir(parents=True)
    wrong = package / "graphs" / "wrong.py"
    wrong.write_text("def late():\n    from ostinato.engine import scheduler\nfrom ..models import llama\n")
    monkeypatch.setattr(f"{__name__}.PACKAGE", package)
    (package / "stray.py").write_text("import numpy\n")
    assert {"ostinato.engine", "ostinato.models.llama"} <= imported_names(wrong)
    for name in ("ostinato.engine", "ostinato.models.llama"):
        assert f"graphs/wrong.py imports {name}" in against_the_layers(wrong)
    assert against_the_layers(package / "stray.py")
    (package / "graphs" / "outside.py").write_text("def late():\n    import requests\n")
    assert from_outside("graphs", {"torch"}) == {"outside.py imports requests"}


def test_importing_the_package_does_not_load_torch() -> None:
    import subprocess

    code = "import sys, ostinato, ostinato.cli.main, ostinato.compat.vllm; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
