"""Turns an adapter's files, or tensors, into an `Adapter` that fits a model; nothing is taken on trust."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.lora import LowRank

from ..layers import Linear
from ..transformer import Transformer
from .adapter import Adapter, Parts
from .errors import AdapterError
from .peft_config import PeftConfig

_SAFETENSORS, _PICKLED = "adapter_model.safetensors", "adapter_model.bin"
_PREFIXES = ("base_model.model.", "model.")
_MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")
_READABLE = (torch.float32, torch.float16, torch.bfloat16)
_MEANINGS = {
    "lora_magnitude_vector": "DoRA is not supported",
    "lora_embedding_": "adapters of embeddings are not supported",
    ".bias": "biases of adapters are not supported",
    "modules_to_save": "fully trained layers are not supported",
    ".base_layer.": "PEFT saves a layer of the model with adapters of embeddings and of the output layer, "
    "which are not supported",
}


class AdapterReader:
    """Reads adapters for one model. May be used during the engine's steps, in any thread."""

    def __init__(self, model: Transformer, max_rank: int) -> None:
        weight = model.embed_tokens.weight
        self._dtype, self._is_pinned = weight.dtype, weight.is_cuda
        self._max_rank = max_rank
        self._architecture = model.config.architecture
        self._places: dict[str, tuple[str, int]] = {}
        """Checkpoint layers by their names: our layer, and which of its parts."""
        self._shapes: dict[str, tuple[int, int]] = {}
        """Their shapes, [out, in]."""
        self._num_parts: dict[str, int] = {}
        for name, linear in adaptable(model).items():
            full = model.config.family.tensors.of(name)
            rows = linear.parts or (linear.weight.size(0),)
            self._num_parts[name] = len(full)
            for part, (layer, num_rows) in enumerate(zip(full, rows, strict=True)):
                self._places[layer] = name, part
                self._shapes[layer] = num_rows, linear.weight.size(1)
        self._short = {_short(name): name for name in self._places}
        self._outside_layers = tuple(model.config.family.tensors.top.values())

    def read(self, path: str | Path) -> Adapter:
        """The adapter in a directory. Raises AdapterError if there is none, or if it does not fit."""
        directory = _located(str(path))
        config = PeftConfig.load(directory)
        with closing(_stored(directory)) as stored:
            return self._made(config, stored, str(directory))

    def made_of(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> Adapter:
        """An adapter from these tensors and the contents of its `adapter_config.json`."""
        where = f"adapter {name!r}"
        return self._made(PeftConfig.of(config, where), iter(tensors.items()), where)

    def _made(self, config: PeftConfig, tensors: Iterator[tuple[str, Tensor]], where: str) -> Adapter:
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors:
            module, which = self._place_of(name, where)
            if which in found.setdefault(module, {}):
                raise AdapterError(f"{where}: layer {module} has matrix {which} twice")
            found[module][which] = self._checked(tensor, f"{where}: tensor {name}")
        if not found:
            raise AdapterError(f"{where} contains no matrices")
        self._check_targets(config, found, where)
        layers: dict[str, list[LowRank | None]] = {}
        digest, rank = hashlib.blake2b(digest_size=16), 0
        for module in sorted(found):
            pair = self._pair(config, module, found[module], where)
            layer, part = self._places[module]
            layers.setdefault(layer, [None] * self._num_parts[layer])[part] = pair
            rank = max(rank, pair.a.size(0))
            digest.update(module.encode())
            for matrix in (pair.a, pair.b):
                digest.update(matrix.view(torch.uint8).numpy().data)
        parts: dict[str, Parts] = {layer: tuple(found) for layer, found in layers.items()}
        return Adapter(parts, rank, digest.digest())

    def _check_targets(self, config: PeftConfig, found: Mapping[str, object], where: str) -> None:
        """Check that the file contains exactly the layers that the configuration names."""
        targeted = config.targeted(self._places)
        if missing := sorted(targeted - found.keys()):
            raise AdapterError(
                f"{where}: {len(missing)} layers in its target_modules have no tensors, for example "
                f"{missing[0]}: the file is incomplete"
            )
        if config.target_modules is not None and (unnamed := sorted(found.keys() - targeted)):
            raise AdapterError(
                f"{where}: {len(unnamed)} layers have tensors but are not in its target_modules, for example "
                f"{unnamed[0]}"
            )
        if config.names_layers and (others := sorted(config.targeted(self._outside_layers))):
            raise AdapterError(
                f"{where}: its target_modules contain {others[0]}, which adapters cannot change; "
                + self._changeable()
            )

    def _place_of(self, name: str, where: str) -> tuple[str, str]:
        matched = _MATRIX.fullmatch(name)
        if matched is None:
            known = next((why for sign, why in _MEANINGS.items() if sign in name), None)
            raise AdapterError(f"{where}: tensor {name} is not a matrix of a LoRA adapter" + _told(known))
        module = self._short.get(_short(matched["module"]))
        if module is None:
            raise AdapterError(
                f"{where}: {matched['module']} is not a layer of {self._architecture} that an adapter can "
                f"change; {self._changeable()}"
            )
        return module, matched["which"]

    def _changeable(self) -> str:
        kinds = sorted({name.rsplit(".", 1)[-1] for name in self._places})
        return f"supported target modules are {', '.join(kinds)}"

    def _checked(self, tensor: object, what: str) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise AdapterError(f"{what} must be a tensor, not {type(tensor).__name__}")
        if tensor.dtype not in _READABLE or tensor.ndim != 2:
            raise AdapterError(
                f"{what} is {tensor.dtype} with {tensor.ndim} dimensions; supported are matrices of float32, "
                "float16 and bfloat16"
            )
        if tensor.device.type == "meta":
            raise AdapterError(f"{what} is on the meta device: it has no contents")
        return tensor.detach().cpu()

    def _pair(self, config: PeftConfig, module: str, found: dict[str, Tensor], where: str) -> LowRank:
        if lacking := {"A", "B"} - found.keys():
            raise AdapterError(f"{where}: layer {module} has no matrix {lacking.pop()}")
        (num_out, num_in), rank = self._shapes[module], config.rank_of(module)
        if rank > self._max_rank:
            raise AdapterError(
                f"{where}: layer {module} has rank {rank}, but the maximum is {self._max_rank}: raise "
                "max_lora_rank"
            )
        for which, expected in (("A", (rank, num_in)), ("B", (num_out, rank))):
            if tuple(found[which].shape) != expected:
                raise AdapterError(
                    f"{where}: matrix {which} of layer {module} has shape {list(found[which].shape)}, "
                    f"not {list(expected)}"
                )
        scaled = found["B"].float() * config.scaling_of(module)
        pair = LowRank(self._kept(found["A"]), self._kept(scaled))
        for which, kept in (("A", pair.a), ("B", pair.b)):
            if not bool(kept.isfinite().all()):
                raise AdapterError(
                    f"{where}: matrix {which} of layer {module} has values that are not finite in "
                    f"{self._dtype}"
                )
        return pair

    def _kept(self, matrix: Tensor) -> Tensor:
        """A copy of our own: the caller may change the original, and a file may be deleted."""
        own = torch.empty(matrix.shape, dtype=self._dtype, pin_memory=self._is_pinned)
        return own.copy_(matrix)


def adaptable(model: Transformer) -> dict[str, Linear]:
    """The linear layers that an adapter can change, by name."""
    modules = model.layers.named_modules(prefix="layers")
    return {name: module for name, module in modules if isinstance(module, Linear)}


def _located(name: str) -> Path:
    """A directory on this machine, or one downloaded from the hub."""
    path = Path(name).expanduser()
    if path.exists() or name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=["adapter_*"]))
    except Exception as error:  # whatever the network and the hub raise
        raise AdapterError(
            f"{name!r} is not a directory on this machine and could not be downloaded from the hub: "
            f"{type(error).__name__}: {error}"
        ) from error


def _short(name: str) -> str:
    """The name without PEFT's prefixes; a bare model's names have one prefix less."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _told(why: str | None) -> str:
    return "" if why is None else f": {why}"


def _stored(directory: Path) -> Generator[tuple[str, Tensor]]:
    """All tensors of an adapter's file."""
    from safetensors import SafetensorError, safe_open

    file = directory / _SAFETENSORS
    if file.is_file():
        try:
            with safe_open(file, framework="pt") as reader:
                for name in sorted(reader.keys()):
                    yield name, reader.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise AdapterError(f"{file} is not a readable safetensors file: {error}") from error
        return
    file = directory / _PICKLED
    if not file.is_file():
        raise AdapterError(f"{directory} has neither {_SAFETENSORS} nor {_PICKLED}")
    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling raises whatever the file makes it raise
        raise AdapterError(f"{file} is not a readable file of tensors: {error}") from error
    if not isinstance(stored, dict):
        raise AdapterError(f"{file} does not contain tensors by name")
    for name, tensor in stored.items():
        yield str(name), tensor
