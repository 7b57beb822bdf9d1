"""Loads weights from a Hugging Face directory, or random ones, into a `Transformer`; checks every tensor."""

import json
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ostinato.kernels.allocation import Allocate

from .config import ModelConfig
from .errors import WeightsError
from .finite_weights import FiniteCheck, refuse_nonfinite
from .layers import Linear, RMSNorm
from .transformer import Transformer

LoadFormat = Literal["safetensors", "dummy"]
"""`safetensors` reads the checkpoint; `dummy` makes deterministic random weights from `config.json` alone."""

OUTPUT_LAYER = "lm_head.weight"
"""Name in checkpoints; if the output layer is tied to the embeddings it may be missing."""

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_READABLE_DTYPES = {"F32", "F16", "BF16"}


def load_model(
    directory: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    load_format: LoadFormat = "safetensors",
    max_positions: int | None = None,
    seed: int = 0,
    allocate: Allocate | None = None,
    config: ModelConfig | None = None,
    allow_nonfinite: bool = False,
) -> Transformer:
    """Build the model of `directory` with its weights on `device` in `dtype` (default: the checkpoint's).

    `allocate`: allocates the weights instead of torch. `config`: the model's shape, if not as in `directory`.
    `allow_nonfinite`: take NaN and infinite weights, with a warning.
    """
    config = config or ModelConfig.load(directory)
    model = Transformer(
        config,
        device=device,
        dtype=dtype or getattr(torch, config.dtype),
        max_positions=max_positions,
        allocate=allocate,
    )
    fill_model(model, directory, load_format=load_format, seed=seed, allow_nonfinite=allow_nonfinite)
    return model


def fill_model(
    model: Transformer,
    directory: str | Path,
    *,
    load_format: LoadFormat = "safetensors",
    seed: int = 0,
    allow_nonfinite: bool = False,
) -> None:
    """Load the weights of a model that was only allocated, in place."""
    if load_format == "dummy":
        fill_with_random_weights(model, seed)
    elif load_format == "safetensors":
        load_weights(model, directory, allow_nonfinite=allow_nonfinite)
    else:
        raise WeightsError(f"unknown load_format {load_format!r}: use safetensors or dummy")


def checkpoint_tensors(model: Transformer) -> dict[str, Tensor]:
    """Every weight under its checkpoint name, as a view of the parameter that holds it: copy into a view to
    load, read it to export. Fused layers appear as their parts if the checkpoint has them separately."""
    views: dict[str, Tensor] = {}
    for module_name, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            names = model.config.family.tensors.of(module_name)
            is_apart = isinstance(module, Linear) and len(names) > 1
            tensors = parameter.split(list(module.matrix.parts)) if is_apart else (parameter,)
            views |= {f"{name}.{kind}": view for name, view in zip(names, tensors, strict=True)}
    return views


def load_weights(model: Transformer, directory: str | Path, *, allow_nonfinite: bool = False) -> None:
    """Copy the checkpoint in `directory` into `model`, in place: no address changes."""
    dtype = model.embed_tokens.weight.dtype
    finite = FiniteCheck(dtype)
    # A checkpoint saved from the bare model has names without "model.".
    wanted = {name.removeprefix("model."): view for name, view in checkpoint_tensors(model).items()}
    loaded: set[str] = set()
    output_layer: Tensor | None = None
    for tensor in _stored_tensors(Path(directory), model.embed_tokens.weight.device):
        name = tensor.name.removeprefix("model.")
        if name not in wanted:
            if is_tied(name, model.config):
                output_layer = tensor.reader.get_tensor(tensor.name)
            if ignorable(name, model.config):
                continue
            raise WeightsError(
                f"{tensor.file}: tensor {tensor.name} has no place in {model.config.architecture}"
            )
        _copy(tensor, wanted[name])
        finite.add(tensor.name, wanted[name])
        loaded.add(name)
    if missing := sorted(wanted.keys() - loaded):
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise WeightsError(
            f"{directory}: tensors missing from the checkpoint: {', '.join(missing[:4])}{more}"
        )
    if output_layer is not None and not are_equal(output_layer, model.embed_tokens.weight):
        raise WeightsError(
            f"{directory}: config.json ties the output layer to the embeddings, but {OUTPUT_LAYER} in the "
            'checkpoint differs from them; to use it, set hf_overrides={"tie_word_embeddings": false}'
        )
    if bad := set(finite.bad()):
        # Read again, because only the checkpoint tells infinite values from those that became so.
        stored = _stored_tensors(Path(directory), torch.device("cpu"))
        found = ((each.name, each.reader.get_tensor(each.name)) for each in stored if each.name in bad)
        refuse_nonfinite(found, dtype, place=f"{directory}: ", allowed=allow_nonfinite)


def fill_with_random_weights(model: Transformer, seed: int = 0) -> None:
    """Weights that depend only on `seed`, the tensor's name and the kind of device, scaled so that
    activations and logits stay of order one at any depth."""
    names = model.config.family.tensors
    norms = {
        f"{name}.weight"
        for module_name, module in model.named_modules()
        if isinstance(module, RMSNorm)
        for name in names.of(module_name)
    }
    residual_scale = (2 * model.config.num_layers) ** -0.5
    for name, tensor in checkpoint_tensors(model).items():
        if name in norms:
            tensor.fill_(1.0)
            continue
        generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        scale = 0.02 if tensor.ndim == 1 else tensor.shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale *= residual_scale
        tensor.normal_(0.0, scale, generator=generator)


@dataclass(frozen=True)
class _StoredTensor:
    name: str
    file: Path
    reader: Any


def _copy(tensor: _StoredTensor, target: Tensor) -> None:
    place = f"{tensor.file}: tensor {tensor.name}"
    header = tensor.reader.get_slice(tensor.name)
    if list(header.get_shape()) != list(target.shape):
        raise WeightsError(
            f"{place} has shape {list(header.get_shape())}, but config.json requires {list(target.shape)}"
        )
    if header.get_dtype() not in _READABLE_DTYPES:
        raise WeightsError(f"{place} is stored as {header.get_dtype()}; supported are F32, F16 and BF16")
    target.copy_(tensor.reader.get_tensor(tensor.name))


def ignorable(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is not needed: a tied or bare model's output layer, or rotary frequencies, which old
    checkpoints contain."""
    return (name == OUTPUT_LAYER and (config.tie_word_embeddings or not config.has_lm_head)) or name.endswith(
        "rotary_emb.inv_freq"
    )


def is_tied(name: str, config: ModelConfig) -> bool:
    """Whether this is an output layer that must equal the embeddings."""
    return name == OUTPUT_LAYER and config.tie_word_embeddings and config.has_lm_head


def are_equal(given: Tensor, held: Tensor) -> bool:
    """Whether these are equal in the dtype of the held tensor."""
    return given.shape == held.shape and torch.equal(given.to(held.device, held.dtype), held)


def stored_weights(directory: Path, device: torch.device) -> Generator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint with its name, read onto `device` when it is its turn."""
    for tensor in _stored_tensors(directory, device):
        yield tensor.name, tensor.reader.get_tensor(tensor.name)


def stored_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The names in a checkpoint with their shapes; reads no tensor."""
    tensors = _stored_tensors(directory, torch.device("cpu"))
    return {each.name: tuple(each.reader.get_slice(each.name).get_shape()) for each in tensors}


def _stored_tensors(directory: Path, device: torch.device) -> Iterator[_StoredTensor]:
    """Readers that load directly onto `device`."""
    from safetensors import SafetensorError, safe_open

    for file, expected in _weight_files(directory).items():
        try:
            reader = safe_open(file, framework="pt", device=str(device))
        except (SafetensorError, OSError) as error:
            raise WeightsError(
                f"{file} is not a readable safetensors file: {error}; download it again"
            ) from error
        with reader:
            names = set(reader.keys())
            if expected is not None and (absent := sorted(expected - names)):
                raise WeightsError(f"{file}: tensor {absent[0]} is missing, although {_INDEX} lists it there")
            for name in sorted(names):
                yield _StoredTensor(name, file, reader)


def _weight_files(directory: Path) -> dict[Path, set[str] | None]:
    """The files to read, each with the tensors that the index lists in it (None without an index)."""
    if not directory.is_dir():
        raise WeightsError(f"{directory} is not a directory on this machine")
    index, single = directory / _INDEX, directory / _SINGLE
    if index.is_file():
        try:
            placed: dict[str, str] = json.loads(index.read_text())["weight_map"]
            files: dict[Path, set[str] | None] = {
                directory / file: {name for name, place in placed.items() if place == file}
                for file in sorted(set(placed.values()))
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{index} is not a readable index: {error!r}") from error
        absent = [file.name for file in files if not file.is_file()]
        if single.is_file() and single not in files:
            # Saving one way over the other leaves the old files behind: transformers does this.
            if len(absent) == len(files):
                return {single: None}
            raise WeightsError(
                f"{directory}: there are both {_SINGLE} and an {_INDEX} that lists other files; remove the "
                "older of the two"
            )
        if absent:
            raise WeightsError(
                f"{directory}: {len(absent)} of {len(files)} shards missing: {', '.join(absent)}"
            )
        return files
    found = sorted(directory.glob("*.safetensors"))
    if single in found or len(found) == 1:
        return {single if single in found else found[0]: None}
    if found:
        raise WeightsError(
            f"{directory}: there are {len(found)} safetensors files, but no {_INDEX} that lists their tensors"
        )
    old = [file.name for file in sorted(directory.glob("*.bin"))]
    hint = f"; {old[0]} is in an old format, and only safetensors files are read" if old else ""
    raise WeightsError(f"{directory}: there is neither {_SINGLE} nor {_INDEX}{hint}")
