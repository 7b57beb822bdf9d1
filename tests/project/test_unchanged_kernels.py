"""One case of each test of a kernel while kernels are what they were; after a change all of them."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernels import unchanged

ROOT = Path(__file__).parents[2]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "src" / "inner").mkdir(parents=True)
    (tmp_path / "src" / "a.cu").write_text("int a;")
    (tmp_path / "src" / "inner" / "b.py").write_text("b = 1")
    return tmp_path


def noted(folder: Path) -> bool:
    return unchanged.are_unchanged((folder / "src",), folder / "note.json")


def test_a_changed_a_new_and_a_lost_file_are_noticed(sources: Path) -> None:
    assert not noted(sources)
    (sources / "note.json").write_text(json.dumps({"digest": unchanged.digest((sources / "src",))}))
    assert noted(sources)
    file = sources / "src" / "inner" / "b.py"
    file.write_text("b = 2")
    assert not noted(sources)
    file.write_text("b = 1")
    assert noted(sources)
    (sources / "src" / "c.cuh").write_text("")
    assert not noted(sources)
    (sources / "src" / "c.cuh").unlink()
    file.rename(sources / "src" / "b.py")
    assert not noted(sources)


@dataclass
class Item:
    nodeid: str
    is_slow: bool = False

    @property
    def path(self) -> Path:
        return ROOT / self.nodeid.split("::")[0]

    def get_closest_marker(self, name: str) -> object:
        return self.is_slow or None


def test_one_case_of_each_stays_and_everything_of_other_folders() -> None:
    slow = Item("tests/kernels/test_a.py::test_x[0]", is_slow=True)
    first, second = (Item(f"tests/kernels/test_a.py::test_x[{number}]") for number in (1, 2))
    other = Item("tests/kernels/test_b.py::test_x")
    outside = [Item(f"tests/unit/test_cuda_c.py::test_x[{number}]") for number in range(3)]
    compiled = [Item(f"tests/kernels/test_cuda_d.py::test_{name}") for name in "xy"]
    kept, left = unchanged.one_of_each([slow, first, second, other, *outside, *compiled])
    assert kept == [slow, first, other, *outside, compiled[0]]
    assert left == [second, compiled[1]]


def test_only_a_run_of_everything_is_brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for names in (["tests/kernels"], ["tests/unit", "tests/kernels/test_sampling.py::test_a"]):
        assert unchanged.are_asked_for(names)
    for names in ([], ["tests"], [str(ROOT / "tests" / "unit")]):
        assert not unchanged.are_asked_for(names)
