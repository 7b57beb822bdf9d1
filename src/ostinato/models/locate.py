"""From the model that a user names to a directory with `config.json`, safetensors and tokenizer files."""

from collections.abc import Callable
from pathlib import Path

from .default_model import default_model_gguf
from .errors import DownloadError, ModelError

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]
_NOT_FROM_HUB = ["consolidated*.safetensors"]
"""A second copy of the weights, in Mistral's own format."""


def locate_model(
    model: str | Path | None = None,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    with_pickles: bool = False,
) -> Path:
    """The directory of `model`: None for the default model, a model directory, a .gguf file (converted into
    the cache on first use), or the name of a repository on the Hugging Face hub.

    `revision`, `download_dir` and `with_pickles` apply to the hub: which commit, where it is kept, and
    whether files of pickled tensors are downloaded too."""
    is_here = model is None or Path(model).expanduser().exists()
    if is_here and revision not in (None, "main"):
        raise ModelError(
            f"revision {revision!r} is only for models from the hub, and {model or 'the default'} is not one"
        )
    if model is None:
        return _converted(default_model_gguf(), lambda: default_model_gguf(check=True))
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix == ".gguf":
            return _converted(path)
        raise ModelError(f"{path} is a file but not a .gguf; give a .gguf file or the directory of a model")
    if path.suffix == ".gguf":
        raise ModelError(f"{path} does not exist")
    files = [*_HUB_FILES, "pytorch_model.bin"] if with_pickles else _HUB_FILES
    return _from_hub(str(model), revision, download_dir, files)


def _converted(gguf: Path, restored: Callable[[], Path] | None = None) -> Path:
    from .gguf import convert_gguf

    return convert_gguf(gguf, restored=restored)


def _from_hub(name: str, revision: str | None, download_dir: str | None, files: list[str]) -> Path:
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelError(
            f"no model {name!r}: there is no such directory or file, and a hub name has the form owner/model"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise DownloadError(
            f"no directory {name!r} here, and huggingface_hub is not installed to look for it on the hub"
        ) from error
    try:
        fetched = snapshot_download(
            name,
            allow_patterns=files,
            ignore_patterns=_NOT_FROM_HUB,
            revision=revision,
            cache_dir=download_dir,
        )
        return Path(fetched)
    except Exception as error:  # whatever the network and the hub raise, the user needs the same advice
        raise DownloadError(
            f"{name!r} is not a directory on this machine and could not be downloaded from the hub: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else error!r}. "
            "Give the path of a model directory or of a .gguf file, or no model for the default one"
        ) from error
