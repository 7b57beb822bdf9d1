"""Machine code kept on disk: used if it is what was written, compiled again if not. No GPU, no compiler."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ostinato.kernels.cuda import compiled

HOPPER = (9, 0)


class Compiler:
    """Counts what it is asked for; its machine code depends on the source and the options."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, source: str, name: str, options: list[str]) -> tuple[bytes, str]:
        self.runs += 1
        return b"\x7fELF" + repr((source, options)).encode(), ""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    monkeypatch.setattr(compiled, "_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compiled, "_nvrtc_version", lambda: "(13, 0)")
    found = Compiler()
    monkeypatch.setattr(compiled, "_compile", found)
    return found


def code_of(**constants: int) -> bytes:
    return compiled.CudaKernel("few_tokens.cu", "project", constants).compile(HOPPER)


def test_what_was_kept_is_used(compiler: Compiler) -> None:
    assert code_of(ROWS=8) == code_of(ROWS=8)
    assert compiler.runs == 1
    assert code_of(ROWS=8) != code_of(ROWS=16)
    assert compiler.runs == 2


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "longer"])
def test_a_damaged_file_is_compiled_again(
    compiler: Compiler, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    right = code_of(ROWS=8)
    [file] = tmp_path.iterdir()
    content = file.read_bytes()
    flipped = bytes([*content[:20], content[20] ^ 4, *content[21:]])
    damaged = {"cut": content[:-9], "empty": b"", "flipped": flipped, "longer": content + b"x"}
    file.write_bytes(damaged[damage])
    with caplog.at_level(logging.WARNING, "ostinato.kernels"):
        assert code_of(ROWS=8) == right
    assert compiler.runs == 2
    assert [str(file) in record.getMessage() for record in caplog.records] == [True]
    assert code_of(ROWS=8) == right
    assert compiler.runs == 2, "the file is as it was"


def test_the_file_of_another_kernel_is_not_used(compiler: Compiler, tmp_path: Path) -> None:
    code_of(ROWS=8)
    [first] = tmp_path.iterdir()
    right = code_of(ROWS=16)
    [second] = set(tmp_path.iterdir()) - {first}
    second.write_bytes(first.read_bytes())
    assert code_of(ROWS=16) == right


def test_a_folder_in_the_place_of_a_file(compiler: Compiler, tmp_path: Path) -> None:
    right = code_of(ROWS=8)
    [file] = tmp_path.iterdir()
    file.unlink()
    file.mkdir()
    assert code_of(ROWS=8) == right
    assert [path.name for path in tmp_path.iterdir()] == [file.name], "and nothing is left beside it"
