"""Measures how much of the code a reader has to hold: `python tests/project/house.py [--root CHECKOUT]`.

Serves the default model from the checkout's sources, follows one streamed chat request through all processes
by a profile function, and prints a table; `--output FILE` writes the same as JSON. A file is on a path if one
of its functions ran in the measured time and not in the idle time before: timers alone do not count.
"""

import argparse
import ast
import contextlib
import http.client
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

FRAGMENT_LINES = 40
NO_VERB = ("What", "Whether", "Of", "How")
"""First words of docstrings that say no verb."""

TRACER = """
import os, sys, threading, time
folder, package, seen, phase = os.environ["HOUSE_FOLDER"], os.environ["HOUSE_PACKAGE"], set(), ""
def note(frame, event, _):
    if event == "call":
        seen.add(frame.f_code)
def write():
    names = {(c.co_filename, c.co_qualname) for c in list(seen) if c.co_filename.startswith(package)}
    names = {(file, name) for file, name in names if name != "<module>"}
    if names:
        with open(f"{folder}/{phase}-{os.getpid()}", "w") as to:
            to.writelines(f"{file}\\t{name}\\n" for file, name in names)
def watch():
    global phase, seen
    sys.setprofile(None)
    while True:
        time.sleep(0.005)
        try:
            now = open(f"{folder}/phase").read()
        except OSError:
            return
        if now != phase:
            write()
            phase, seen = now, set()
            open(f"{folder}/at-{phase}-{os.getpid()}", "w").close()
threading.Thread(target=watch, daemon=True).start()
threading.setprofile(note)
sys.setprofile(note)
"""
"""A `sitecustomize` for the server's processes: one list of the functions that ran in each phase."""

FIRST_CALL = """
import inspect, sys, torch, torch._dynamo
import ostinato
graphed = ostinato.graphed
[sizes] = [
    name for name, argument in inspect.signature(graphed).parameters.items()
    if argument.kind is argument.KEYWORD_ONLY and argument.default is argument.empty
]
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).eval()
f = graphed(model, **{sizes: [1, 2, 4, 8]})
package, ran = sys.argv[1], set()
def note(frame, event, _):
    if event == "call" and frame.f_code.co_filename.startswith(package):
        ran.add((frame.f_code.co_filename, frame.f_code.co_qualname))
sys.setprofile(note)
with torch.no_grad():
    f(torch.randn(5, 64))
sys.setprofile(None)
print(*{file for file, name in ran if name != "<module>"}, sep="\\n")
print("--")
modules = {module.__file__ for name, module in list(sys.modules.items()) if name.startswith("ostinato.")}
print(*filter(None, modules), sep="\\n")
"""


def size(files: Iterable[str | Path]) -> dict[str, int]:
    """Returns how many files these are, and how many lines they have together."""
    unique = {Path(file) for file in files}
    return {"files": len(unique), "lines": sum(map(line_count, unique))}


def line_count(file: Path) -> int:
    """Returns a file's number of lines."""
    return file.read_bytes().count(b"\n")


class Server:
    """The default model served from a checkout, with the functions that run in named phases."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._folder = folder
        self._package = root / "src" / "ostinato"
        (folder / "sitecustomize.py").write_text(TRACER)
        self.phase("start", settle=False)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        search = os.pathsep.join([str(folder), str(root / "src")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ostinato", "serve", "--port", str(self._port)],
            env={
                **os.environ,
                "PYTHONPATH": search,
                "HOUSE_FOLDER": str(folder),
                "HOUSE_PACKAGE": str(self._package),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def phase(self, name: str, *, settle: bool = True) -> None:
        """Starts a phase in every process, and waits until each has noticed."""
        before = list(self._folder.glob("at-*"))
        processes = {file.name.rpartition("-")[2] for file in before}
        next_file = self._folder / "next"
        next_file.write_text(name)
        next_file.replace(self._folder / "phase")
        deadline = time.monotonic() + 2
        while settle and time.monotonic() < deadline:
            if all((self._folder / f"at-{name}-{process}").exists() for process in processes):
                return
            time.sleep(0.005)

    def wait(self) -> None:
        """Waits until the model is served."""
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            if self._process.poll() is not None:
                raise SystemExit("the server ended before it served anything")
            time.sleep(0.2)
        raise SystemExit("the server did not start within five minutes")

    def stream(self, tokens: int) -> Iterator[bytes]:
        """Yields the lines of one streamed chat request's answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        question = {"role": "user", "content": "What is the capital of France? Tell me all about it."}
        body = {"messages": [question], "stream": True, "max_tokens": tokens, "ignore_eos": True}
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        while line := reply.readline():
            yield line

    def ran(self, phase: str) -> dict[str, set[tuple[str, str]]]:
        """Returns (file, function) of all that ran in a phase, by process."""
        return {
            file.name.rpartition("-")[2]: {
                (path, name) for path, name in (line.split("\t") for line in file.read_text().splitlines())
            }
            for file in self._folder.glob(f"{phase}-*")
        }

    def end(self) -> None:
        """Ends the server and everything that it started."""
        self._process.terminate()
        self._process.wait(30)


def request_paths(root: Path) -> dict[str, dict[str, int]]:
    """Measures a request from HTTP to tokens and back, and the steps in its middle."""
    with tempfile.TemporaryDirectory() as name:
        server = Server(root, Path(name))
        try:
            server.wait()
            list(server.stream(8))  # what only a first request does
            server.phase("idle")
            time.sleep(2.5)
            server.phase("request")
            lines = list(server.stream(8))
            assert sum(b"data:" in line for line in lines) > 8
            server.phase("between")
            stream = server.stream(120)
            for _ in range(60):
                next(stream)
            server.phase("steps")
            for _ in range(40):
                next(stream)
            server.phase("rest")
            list(stream)
            time.sleep(0.2)
            idle = set().union(*server.ran("idle").values())
            request = set().union(*server.ran("request").values())
            steps = {file for file, _ in set().union(*engine_side(server.ran("steps"))) - idle}
        finally:
            server.end()
    return {
        "request, from HTTP to a token and back": size({file for file, _ in request - idle}),
        "decode step, in the engine's process": size(steps),
    }


def engine_side(processes: dict[str, set[tuple[str, str]]]) -> list[set[tuple[str, str]]]:
    """Returns the functions of those processes in which graphs run."""
    return [ran for ran in processes.values() if any("/ostinato/graphs/" in file for file, _ in ran)]


def first_call(root: Path) -> dict[str, dict[str, int]]:
    """Measures the first call of a graphed model: files that are imported for it, and that run in it."""
    package = root / "src" / "ostinato"
    told = subprocess.run(
        [sys.executable, "-c", FIRST_CALL, str(package)],
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    middle = told.index("--")
    return {
        "graphed, first call: run": size(told[:middle]),
        "graphed, first call: imported": size(told[middle + 1 :]),
    }


def tracked(root: Path, folder: str) -> list[Path]:
    """Returns the files of a folder that belong to the project."""
    listed = subprocess.run(
        ["git", "ls-files", folder],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    return [root / name for name in listed.stdout.splitlines() if (root / name).is_file()]


def importers(root: Path) -> dict[Path, set[Path]]:
    """Returns for each module of the package those that import it, at any depth of their code."""
    package = root / "src" / "ostinato"
    files = {".".join(("ostinato", *parts_of(package, file))): file for file in package.rglob("*.py")}
    found: dict[Path, set[Path]] = {file: set() for file in files.values() if file.stem != "__init__"}
    for file in files.values():
        here = ("ostinato", *file.relative_to(package).parts[:-1])
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = here[: len(here) - node.level + 1] if node.level else ()
                module = ".".join((*base, *filter(None, [node.module])))
                names = [f"{module}.{alias.name}" for alias in node.names]
            for name in names:
                target = files.get(name) or files.get(name.rpartition(".")[0])
                if target in found and target != file:
                    found[target].add(file)
    return found


def parts_of(package: Path, file: Path) -> tuple[str, ...]:
    """Returns the parts of a module's name below the package."""
    parts = file.relative_to(package).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def names_of_the_package(root: Path) -> dict[str, Any]:
    """Counts class names that several modules define, and module names that occur several times."""
    classes: dict[str, set[Path]] = defaultdict(set)
    package = root / "src" / "ostinato"
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                classes[node.name].add(file)
    modules = Counter(file.stem for file in package.rglob("*.py") if file.stem != "__init__")
    return {
        "class names in several modules": {
            name: len(files) for name, files in sorted(classes.items()) if len(files) > 1
        },
        "module names that occur several times": {
            name: count for name, count in sorted(modules.items()) if count > 1
        },
    }


def docstrings_without_a_verb(files: Iterable[Path]) -> int:
    """Counts docstrings, attributes' included, whose first word is none that says what a thing does."""
    count = 0
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            for statement in getattr(node, "body", ()) if not isinstance(node, ast.expr) else ():
                text = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    count += text.value.split(maxsplit=1)[:1] in [[word] for word in NO_VERB]
    return count


def private_touches(file: Path) -> int:
    """Counts attributes with an underscore that a test reads from something other than itself."""
    return sum(
        isinstance(node, ast.Attribute)
        and re.fullmatch(r"_[a-z]\w*", node.attr) is not None
        and not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"})
        for node in ast.walk(ast.parse(file.read_text()))
    )


def matched_messages(file: Path) -> int:
    """Counts the patterns that a test file holds against messages."""
    return sum(
        isinstance(node, ast.keyword) and node.arg == "match"
        for node in ast.walk(ast.parse(file.read_text()))
    )


def sources(root: Path) -> dict[str, Any]:
    """Measures the files of the package and of its tests as text."""
    files, tests = tracked(root, "src"), tracked(root, "tests")
    code = [file for file in files if file.suffix in {".py", ".cu", ".cuh", ".c", ".html", ".js", ".css"}]
    lines = sorted(line_count(file) for file in code)
    one_importer = [file for file, by in importers(root).items() if len(by) == 1]
    python = [file for file in files if file.suffix == ".py"]
    test_files = [file for file in tests if file.suffix == ".py"]
    return {
        "source": {
            "files": len(code),
            "lines": sum(lines),
            "median": int(statistics.median(lines)),
            f"below {FRAGMENT_LINES} lines": sum(n < FRAGMENT_LINES for n in lines),
        },
        "modules with one importer": size(one_importer),
        "tests": size(test_files),
        "docstrings that begin with What, Whether, Of or How": {
            "source": docstrings_without_a_verb(python),
            "tests": docstrings_without_a_verb(test_files),
        },
        "in tests": {
            "match=": sum(map(matched_messages, test_files)),
            "private attributes": sum(map(private_touches, test_files)),
        },
        **names_of_the_package(root),
    }


def measured(root: Path, *, runs: bool) -> dict[str, Any]:
    """Measures a checkout; `runs`: also by running it."""
    commit = subprocess.run(
        ["git", "log", "-1", "--format=%h %s"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.strip()
    ran = {**request_paths(root), **first_call(root)} if runs else {}
    return {"commit": commit, **ran, **sources(root)}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="checkout to measure")
    parser.add_argument("--output", type=Path, help="file for the same as JSON")
    parser.add_argument("--no-runs", action="store_true", help="read the sources, run nothing")
    options = parser.parse_args()
    result = measured(options.root.resolve(), runs=not options.no_runs)
    for what, value in result.items():
        told = (
            ", ".join(f"{name}: {count:,}" for name, count in value.items())
            if isinstance(value, dict)
            else value
        )
        print(f"{what}: {told}")
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
