"""The tensors of a draft's checkpoint: names and shapes before anything is read, then one after another.

Heads are often published as `pytorch_model.bin`, of which only tensors are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import WeightsError
from ..weights import stored_shapes, stored_weights

_PICKLED = "pytorch_model.bin"


@dataclass(frozen=True)
class Checkpoint:
    """Where a draft's weights are, and which there are."""

    directory: Path
    shapes: Mapping[str, tuple[int, ...]]
    """By name, without a leading `model.`."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Prefixes that names may have, and the ones used here instead."""

    @classmethod
    def find(cls, directory: Path, other_names: Mapping[str, str] | None = None) -> Checkpoint:
        """Look at the files of a folder. Raises WeightsError if none of them can be read."""
        others = other_names or {}
        if pickled := _pickled(directory):
            found = {name: tuple(tensor.shape) for name, tensor in _unpickled(pickled).items()}
        else:
            found = stored_shapes(directory)
        return cls(directory, {_usual(name, others): shape for name, shape in found.items()}, others)

    def tensors(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Each tensor with its name, read onto `device` when it is its turn."""
        if pickled := _pickled(self.directory):
            for name, tensor in _unpickled(pickled).items():
                yield _usual(name, self.other_names), tensor.to(device)
        else:
            for name, tensor in stored_weights(self.directory, device):
                yield _usual(name, self.other_names), tensor

    def one(self, name: str, device: torch.device) -> Tensor:
        """One tensor."""
        return next(tensor for found, tensor in self.tensors(device) if found == name)


def _usual(name: str, others: Mapping[str, str]) -> str:
    name = name.removeprefix("model.")
    for other, usual in others.items():
        if name.startswith(other):
            return usual + name.removeprefix(other)
    return name


def _pickled(directory: Path) -> Path | None:
    file = directory / _PICKLED
    return file if file.is_file() and not any(directory.glob("*.safetensors")) else None


def _unpickled(file: Path) -> dict[str, Tensor]:
    try:
        found: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever is raised, the file is at fault
        raise WeightsError(f"{file} is not a readable file of tensors: {error}; download it again") from error
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise WeightsError(f"{file} does not contain tensors by name")
    return found
