"""A GGUF file, dequantised once into a Hugging Face directory in the cache; later loads never open it."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..text.gguf_tokenizer import tokenizer_files
from .cache_folder import cache_folder, check_room, kept_whole
from .config import ModelConfig
from .errors import ModelError, UnsupportedModelError, WeightsError
from .file_sums import find_damage, write_sums
from .gguf_names import SUPPORTED_GGUF, checkpoint_name, config_from_metadata, llama3_rope

# Part of the cache key: raise it when the conversion changes.
_CONVERSION = 2
_SHARD_BYTES = 2 << 30
_ENDS = frozenset({"<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|endoftext|>", "<|im_end|>"})
"""Tokens that end a text or a turn in any vocabulary that has them, as in llama.cpp."""


def convert_gguf(path: str | Path, *, restored: Callable[[], Path] | None = None) -> Path:
    """The directory with `path` as config.json, safetensors and tokenizer files; made on first use, and made
    again if it is damaged.

    `restored`: called before the file is read, to repair it if possible.
    """
    target = _target_of(Path(path))
    if restored is not None and find_damage(target) is not None:
        path = restored()
        target = _target_of(Path(path))

    def make(scratch: Path) -> None:
        _convert(Path(path).resolve(), scratch)
        write_sums(scratch)

    return kept_whole(target, make, find_damage)


def _target_of(path: Path) -> Path:
    file = path.resolve()
    if not file.is_file():
        raise ModelError(f"{file} does not exist")
    state = file.stat()
    key = f"{file}:{state.st_size}:{state.st_mtime_ns}:{_CONVERSION}"
    return cache_folder() / "gguf" / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def _convert(file: Path, directory: Path) -> None:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise WeightsError(f"{file} is not a readable GGUF file: {error}") from error
    architecture = str(metadata.get("general.architecture"))
    if architecture not in SUPPORTED_GGUF:
        raise UnsupportedModelError(
            f"{file}: GGUF architecture {architecture} is not supported; "
            f"supported are {', '.join(SUPPORTED_GGUF)}"
        )
    if metadata.get("split.count", 0) > 1:
        raise UnsupportedModelError(f"{file}: split GGUF files are not supported; merge them first")
    try:
        config = config_from_metadata(metadata, {tensor.name for tensor in reader.tensors})
        for tensor in reader.tensors:
            if tensor.name == "rope_freqs.weight":
                config["rope_parameters"] = llama3_rope(config, torch.tensor(tensor.data))
        checked = ModelConfig.from_dict(config)
    except ModelError as error:
        raise type(error)(f"{file}: {error}") from error
    check_room(directory, sum(2 * int(tensor.n_elements) for tensor in reader.tensors))
    _write_json(directory / "config.json", config)
    for name, content in tokenizer_files(metadata).items():
        (directory / name).write_text(content)
    _write_json(directory / "generation_config.json", _generation_config(metadata))
    _write_shards(directory, _dequantised(file, reader.tensors, checked, architecture))


def _dequantised(
    file: Path, tensors: list[Any], config: ModelConfig, architecture: str
) -> Iterator[tuple[str, Tensor]]:
    import gguf
    from rich.console import Console
    from rich.progress import track

    # For what was quantised, fp16 keeps every bit that matters at half the size; the rest keeps its dtype.
    stored = {gguf.GGMLQuantizationType.F32: torch.float32, gguf.GGMLQuantizationType.BF16: torch.bfloat16}
    console = Console(stderr=True)
    for tensor in track(tensors, f"ostinato: unpacking {file.name} (once)", console=console):
        if tensor.name == "rope_freqs.weight":
            continue
        name = checkpoint_name(tensor.name)
        if name is None:
            raise WeightsError(f"{file}: tensor {tensor.name} has no place in a {architecture} model")
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except (ValueError, NotImplementedError) as error:
            raise WeightsError(
                f"{file}: tensor {tensor.name} ({tensor.tensor_type.name}) cannot be dequantised: {error}"
            ) from error
        # Tensors that were not quantised are views of the read-only file.
        weight = torch.from_numpy(np.require(values, requirements="W"))
        if config.family.gguf_has_pairs_together and (".q_proj." in name or ".k_proj." in name):
            weight = _pairs_apart(weight, config.num_heads if ".q_proj." in name else config.num_kv_heads)
        dtype = stored.get(tensor.tensor_type, torch.float16)
        if dtype == torch.float16 and weight.abs().max() > torch.finfo(dtype).max:
            dtype = torch.float32
        yield name, weight.to(dtype).contiguous()


def _pairs_apart(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp stores the two members of a rotary pair side by side; here they are half a head apart."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def _generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    ends = [metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    # Most files name one end token, where a generation_config.json has two or three.
    ends += [index for index, token in enumerate(metadata["tokenizer.ggml.tokens"]) if token in _ENDS]
    config: dict[str, Any] = {"eos_token_id": sorted({int(end) for end in ends if end is not None})}
    if (begin := metadata.get("tokenizer.ggml.bos_token_id")) is not None:
        config["bos_token_id"] = int(begin)
    return config


def _write_shards(directory: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write shards, with never more than one in memory."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    shard: dict[str, Tensor] = {}
    placed: dict[str, str] = {}
    size = shards = 0

    def flush() -> None:
        nonlocal size, shards
        shards += 1
        file = f"model-{shards:05}.safetensors"
        try:
            save_file(shard, directory / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise _as_os_error(error) from error
        (directory / file).chmod(0o644)
        placed.update(dict.fromkeys(shard, file))
        shard.clear()
        size = 0

    for name, tensor in tensors:
        shard[name] = tensor
        size += tensor.nbytes
        if size >= _SHARD_BYTES:
            flush()
    if shard:
        flush()
    if shards == 1:
        (directory / "model-00001.safetensors").rename(directory / "model.safetensors")
    else:
        _write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": placed})


def _as_os_error(error: Exception) -> OSError:
    """The error with which safetensors could not write; it has the system's error only in its text."""
    code = re.search(r"os error (\d+)|code: (\d+)", str(error))
    if code is None:
        return OSError(str(error))
    number = int(code[1] or code[2])
    return OSError(number, os.strerror(number))


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n")
