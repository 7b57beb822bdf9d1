"""Loads a draft in two steps: what it is and whether it fits, before anything is allocated; then its
weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ostinato.kernels.allocation import Allocate

from ..config import ModelConfig
from ..errors import ModelError
from ..room import Room
from ..transformer import Transformer
from ..weights import checkpoint_tensors, load_model
from .checkpoint import Checkpoint
from .draft import Draft
from .eagle import EagleHead
from .eagle3 import Eagle3Head
from .head import Head, HeadShape
from .head_config import head_shape
from .head_tensors import OTHER_NAMES, check_head, check_tensors, fill, make_up
from .target_parts import TargetParts
from .whole_model import WholeModel

_HEADS: dict[str, type[Head]] = {"eagle": EagleHead, "eagle3": Eagle3Head}
_NOWHERE = torch.device("meta")


@dataclass(frozen=True)
class FoundDraft:
    """A draft that fits its target; not yet in memory."""

    method: str
    directory: Path
    layers: ModelConfig
    """What attention and the KV cache need to know."""
    head: HeadShape | None = None
    """None: it is a complete model."""
    checkpoint: Checkpoint | None = None
    """None: its weights are random."""

    def load(
        self,
        target: Transformer,
        *,
        max_positions: int,
        seed: int = 0,
        allow_nonfinite: bool = False,
        allocate: Allocate | None = None,
    ) -> Draft:
        """Load its weights next to the target's, in the same dtype.

        `max_positions` bounds its rotary table; `allocate` allocates the weights; `allow_nonfinite` takes NaN
        and infinite weights, with a warning.
        """
        weight = target.embed_tokens.weight
        if self.head is None:
            model = load_model(
                self.directory,
                device=weight.device,
                dtype=weight.dtype,
                load_format="dummy" if self.checkpoint is None else "safetensors",
                max_positions=max_positions,
                seed=seed,
                allocate=_named(allocate),
                config=self.layers,
                allow_nonfinite=allow_nonfinite,
            )
            return WholeModel(model)
        parts = TargetParts.of(target)
        shape = _without_copies(self.head, parts, self.checkpoint)
        room = Room(weight.device, weight.dtype, _named(allocate))
        head = _HEADS[self.method](shape, parts, max_positions, room)
        if self.checkpoint is None:
            make_up(head, seed)
        else:
            fill(head, self.checkpoint, allow_nonfinite)
        return head


def find_draft(method: str, directory: Path, target: ModelConfig, *, made_up: bool = False) -> FoundDraft:
    """The draft in `directory` for this target. Raises ModelError that says what does not fit, or is missing.

    `made_up`: use random weights; only a config.json is needed.
    """
    if not target.has_lm_head:
        raise ModelError(
            f"{target.architecture} has no output layer: it does not generate, so it needs no drafts"
        )
    if method == "draft_model":
        return _whole_model(directory, target, None if made_up else Checkpoint.find(directory))
    checkpoint = None if made_up else Checkpoint.find(directory, OTHER_NAMES[method])
    shape = head_shape(method, directory, target, checkpoint)
    if checkpoint is not None:
        of_target = TargetParts.of(Transformer(target, device=_NOWHERE, max_positions=1))
        check_head(_HEADS[method](shape, of_target, 1, Room(_NOWHERE, torch.float32)), checkpoint)
    return FoundDraft(method, directory, shape.layer, shape, checkpoint)


def _whole_model(directory: Path, target: ModelConfig, checkpoint: Checkpoint | None) -> FoundDraft:
    config = ModelConfig.load(directory)
    if not config.has_lm_head:
        raise ModelError(f"{directory}: {config.architecture} has no output layer: it cannot draft")
    if config.vocab_size != target.vocab_size:
        raise ModelError(
            f"{directory}: vocab_size {config.vocab_size} differs from the target's {target.vocab_size}: a "
            "draft model must have the same vocabulary"
        )
    if checkpoint is not None:
        outline = Transformer(config, device=_NOWHERE, max_positions=1)
        wanted = {name.removeprefix("model."): view for name, view in checkpoint_tensors(outline).items()}
        check_tensors(wanted, checkpoint)
    return FoundDraft("draft_model", directory, config, None, checkpoint)


def _without_copies(shape: HeadShape, target: TargetParts, checkpoint: Checkpoint | None) -> HeadShape:
    """Use the target's embeddings and output layer if the head's are copies of them, as is common."""
    if checkpoint is None:
        return shape

    def is_copy(name: str, weight: Tensor) -> bool:
        stored = checkpoint.one(name, weight.device)
        return stored.shape == weight.shape and torch.equal(stored.to(weight.dtype), weight)

    if shape.has_embedding and is_copy("embed_tokens.weight", target.embed_tokens.weight):
        shape = replace(shape, has_embedding=False)
    if shape.has_lm_head and is_copy("lm_head.weight", target.lm_head.weight):
        shape = replace(shape, has_lm_head=False)
    return shape


def _named(allocate: Allocate | None) -> Allocate | None:
    """The allocator, but with names that no weight of the target has."""
    if allocate is None:
        return None

    def of_draft(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
        return allocate(shape, dtype, f"draft.{name}")

    return of_draft
