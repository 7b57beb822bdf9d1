"""The arguments of a training step: tensors with a length, by name, and what their padding holds."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..dispatching.descriptor import BatchDescriptor
from ..errors import BatchError
from ..inputs.buffers import Batch
from ..inputs.fields import Extent, Field, Scalar
from ..trees import Structure, flatten_with_names
from ..wrapping.signature import EmptyBatchError, Examples, Signature

LENGTH_DIM = 1
IGNORED = -100
"""Torch's losses leave out targets of this value."""
_REAL_LENGTH = "real_length"


class BatchKind:
    """Calls that differ only in length and values."""

    def __init__(self, inputs: Any, targets: Any, *, target_pad: Scalar, with_length: bool) -> None:
        """`with_length`: whether the step must know how many positions are real."""
        leaves, self._structure = _named_leaves(inputs, targets)
        self._names = list(leaves)
        self._with_length = with_length
        length = self._first_length = _length_of(leaves)
        tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
        self.signature = Signature.of(
            _anything,
            (),
            self._keywords(leaves, length),
            batch_dim=LENGTH_DIM,
            shared=[n for n, t in tensors.items() if t.dim() > LENGTH_DIM and t.size(LENGTH_DIM) != length],
            pads=_pads({n: t for n, t in tensors.items() if _is_index(t)}, target_pad),
        )
        batch, _ = self.matched(inputs, targets)
        self._examples = Examples(self.signature, batch)
        self._first = next(name for name in tensors if not _is_target(name))
        self._largest = int(tensors[self._first].max()) if _is_index(tensors[self._first]) else 1
        constants = zip(self.signature.fields, self.signature.constants, strict=True)
        named = zip(sorted(self._keywords(leaves, length)), constants, strict=True)
        self._constants = {name: constant for name, (field, constant) in named if field is None}

    @property
    def opaque(self) -> str | None:
        """Why no graph can serve these batches: they hold something that is neither tensor nor number."""
        found = self.signature.opaque
        return found and f"{found}: pass tensors and numbers, in dictionaries, tuples or dataclasses"

    @property
    def fields(self) -> list[Field]:
        """The declared inputs. In poison mode the first one's padding is another valid value."""
        return [
            replace(field, poison=self._largest if field.name == self._first else field.pad)
            for field in self.signature.tensor_fields
        ]

    def batch_of(self, inputs: Any, targets: Any) -> tuple[Batch, int] | None:
        """The tensors of a call by name, and its length; None if it is of another kind."""
        leaves, structure = _named_leaves(inputs, targets)
        if structure != self._structure or list(leaves) != self._names:
            return None
        length = _length_of(leaves)
        try:
            found = self.signature.batch_of((), self._keywords(leaves, length))
        except EmptyBatchError:
            raise
        except BatchError:  # an input that had the first one's length only by chance
            return None
        return None if found is None else (found[0], length)

    def matched(self, inputs: Any, targets: Any) -> tuple[Batch, int]:
        """The same for a batch that must be of this kind."""
        found = self.batch_of(inputs, targets)
        if found is None:
            raise BatchError("the tensors of inputs and targets do not match each other")
        return found

    def part(self, batch: Batch, start: int, length: int) -> Batch:
        """Some positions of a batch."""
        short = dict(batch)
        for field in self.signature.tensor_fields:
            if field.per is Extent.TOKEN:
                # Batches are contiguous, and models call view() on them.
                short[field.name] = batch[field.name].narrow(LENGTH_DIM, start, length).contiguous()
        if self._with_length:
            short[_REAL_LENGTH] = torch.tensor(length, device="cpu")
        return short

    def alike(self, batch: Batch) -> Batch:
        """The batch with the same at every position: the first that is not padding."""
        pad = next(field.pad for field in self.signature.tensor_fields if field.name == self._first)
        real = (batch[self._first] != pad).transpose(0, LENGTH_DIM).flatten(1).all(1)
        position = int(real.int().argmax())
        same = dict(batch)
        for field in self.signature.tensor_fields:
            if field.per is Extent.TOKEN:
                value = batch[field.name]
                places = torch.full((value.size(LENGTH_DIM),), position, device=value.device)
                same[field.name] = value.index_select(LENGTH_DIM, places)
        return same

    def arguments(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
        """Inputs and targets in the caller's structure."""
        known = {**self._constants, **tensors}
        tree = self._structure.filled([known[name] for name in self._names])
        return tree["inputs"], tree["targets"]

    def length_of(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """The length of these tensors, padding included."""
        return int(tensors[self._first].size(LENGTH_DIM))

    def mask(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Which positions are real, [batch, length]; None if it is not needed."""
        if not self._with_length:
            return None
        first = tensors[self._first]
        positions = torch.arange(first.size(LENGTH_DIM), device=first.device)
        real = positions < tensors[_REAL_LENGTH].to(first.device)
        return real.expand(first.size(0), -1)

    def dummy(self, descriptor: BatchDescriptor) -> Batch:
        """A batch of a rung's length, made from positions of the first batch."""
        return self._examples.dummy(descriptor)

    def first(self) -> tuple[Any, Any]:
        """Inputs and targets of the first batch."""
        return self.arguments(self.dummy(BatchDescriptor(self._first_length, 1)))

    def same_as(self, other: "BatchKind") -> bool:
        return self._names == other._names and self.signature.same_as(other.signature)

    def _keywords(self, leaves: dict[str, Any], length: int) -> dict[str, Any]:
        return {**leaves, _REAL_LENGTH: torch.tensor(length, device="cpu")} if self._with_length else leaves


def _anything(**_: Any) -> None:
    """The callable of a signature of keywords."""


def _named_leaves(inputs: Any, targets: Any) -> tuple[dict[str, Any], Structure]:
    if isinstance(inputs, Mapping):  # also of classes unknown to torch's trees, such as tokenizers' results
        inputs = dict(inputs)
    named, structure = flatten_with_names({"inputs": inputs, "targets": targets})
    leaves: dict[str, Any] = {}
    for number, (_, name, leaf) in enumerate(named):
        readable = re.sub(r"\W+", "_", name).strip("_")
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise BatchError(
                f"{readable} requires a gradient, but a training step computes none for its arguments: "
                f"detach() it, or compute it inside the model"
            )
        leaves[readable if readable not in leaves else f"{readable}_{number}"] = leaf
    return leaves, structure


def _length_of(leaves: Mapping[str, Any]) -> int:
    for name, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor) and leaf.dim() > LENGTH_DIM and not _is_target(name):
            if leaf.size(LENGTH_DIM) == 0 or leaf.size(0) == 0:
                raise BatchError(f"{name} is empty: a batch must have at least one row and one position")
            return int(leaf.size(LENGTH_DIM))
    raise BatchError("inputs have no length: pass a training step tensors [batch, length, ...]")


def _pads(indices: Mapping[str, torch.Tensor], target_pad: Scalar) -> dict[str, Scalar]:
    """Padding of targets, and of labels among inputs, where models of transformers expect them."""
    pads: dict[str, Scalar] = {name: IGNORED for name in indices if name.endswith("_labels")}
    return pads | {name: target_pad for name in indices if _is_target(name)}


def _is_target(name: str) -> bool:
    return name == "targets" or name.startswith("targets_")


def _is_index(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
