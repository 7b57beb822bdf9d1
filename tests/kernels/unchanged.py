"""Whether kernels and their tests are as they were when all of these tests passed.

python tests/kernels/unchanged.py    runs them all and, if they pass, notes the state of the sources

Most changes are not to kernels, and their tests take longest. So a run of the whole suite takes one case of
each of them while the sources are those that were noted, of files that compile CUDA C++ for every case one
test, and of the lists for Triton's interpreter one list; after a change, with another Triton or torch, and
when tests of this folder are asked for by name, all run.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCES = (ROOT / "src" / "ostinato" / "kernels", HERE)
NOTE = HERE / "checked.json"
BRIEF = "OSTINATO_BRIEF_KERNEL_TESTS"
"""Set for processes that tests start."""
COMPILING = "test_cuda_"
"""How the names of files begin whose tests compile kernels in CUDA C++, by g++ or NVRTC."""


def digest(folders: tuple[Path, ...] = SOURCES) -> str:
    """Of every source below these folders, and its name; of what compiles and interprets them."""
    found = hashlib.sha256(" ".join(map(version, ("torch", "triton", "numpy"))).encode())
    for folder in folders:
        for file in sorted(folder.rglob("*")):
            if file.is_file() and file != NOTE and "__pycache__" not in file.parts:
                found.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()


def are_unchanged(folders: tuple[Path, ...] = SOURCES, note: Path = NOTE) -> bool:
    """Since somebody ran all tests."""
    return note.exists() and json.loads(note.read_text())["digest"] == digest(folders)


def are_asked_for(arguments: Sequence[str]) -> bool:
    """Whether pytest was given this folder or something in it by name."""
    return any(Path(argument.split("::")[0]).resolve().is_relative_to(HERE) for argument in arguments)


def is_another_list(item: "pytest.Item") -> bool:
    """Whether it runs a list of checks in Triton's interpreter, and not the one that stands for all."""
    code = getattr(getattr(item, "function", None), "__code__", None)
    is_list = code is not None and "assert_passes" in code.co_names
    return is_list and item.path.name != "test_triton_kernels.py"


def one_of_each(items: "Sequence[pytest.Item]") -> "tuple[list[pytest.Item], list[pytest.Item]]":
    """What runs: all tests of other folders and one case of each here, of files that compile one test; and
    what is left out."""
    kept, left, seen = [], [], set()
    for item in items:
        compiles = item.path.name.startswith(COMPILING)
        test = item.path.name if compiles else item.nodeid.split("[")[0]
        is_more = item.path.is_relative_to(HERE) and (test in seen or is_another_list(item))
        (left if is_more else kept).append(item)
        # A case that is left out anyway does not stand for the others.
        if item.get_closest_marker("slow") is None:
            seen.add(test)
    return kept, left


def is_brief() -> bool:
    """Whether a list of checks is to be cut to a few."""
    return os.environ.get(BRIEF) == "1"


def main() -> int:
    """Run all, slow ones apart, and take note."""
    before = digest()
    options = ["-q", "-n", "auto", "--dist", "loadfile", "-m", "not slow"]
    code = subprocess.run([sys.executable, "-m", "pytest", str(HERE), *options], cwd=ROOT).returncode
    if code == 0 and digest() == before:
        NOTE.write_text(json.dumps({"digest": before, "python": sys.version.split()[0]}) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
