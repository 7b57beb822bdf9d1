"""The draft model beside its target: found and checked before the target is placed, placed after it."""

from __future__ import annotations

import torch

from ostinato.cache.kv import KVCache, KVShape
from ostinato.models.config import ModelConfig
from ostinato.models.drafts.draft import Draft
from ostinato.models.drafts.loading import FoundDraft, find_draft
from ostinato.models.errors import ModelError
from ostinato.models.locate import locate_model
from ostinato.models.transformer import Transformer

from ..resolved_config import ResolvedConfig
from ..speculating.target import DraftParts
from .saved_memory import Arenas, SavedMemory


def draft_for(target: ModelConfig, config: ResolvedConfig) -> FoundDraft | None:
    """The configured draft model, if it fits; None: tokens are drafted without a model, or not at all.

    Raises ModelError that says what does not fit. Allocates nothing.
    """
    asked = config.speculation
    if asked is None:
        return None
    if not target.has_lm_head:
        raise ModelError(f"{target.architecture} has no output layer: remove speculative_config")
    if asked.model is None:
        return None
    directory = locate_model(
        asked.model, revision=asked.revision, download_dir=config.config.download_dir, with_pickles=True
    )
    made_up = (asked.load_format or config.config.load_format) == "dummy"
    return find_draft(asked.method, directory, target, made_up=made_up)


def load_draft(
    found: FoundDraft, target: Transformer, config: ResolvedConfig, arenas: Arenas, memory: SavedMemory | None
) -> Draft:
    """Place it. After sleep its weights are always restored: weight updates are for the target only."""
    draft = found.load(
        target,
        max_positions=config.max_positions,
        seed=config.config.seed,
        allow_nonfinite=config.config.allow_nonfinite_weights,
        allocate=arenas("weights", config.device) if memory is None else memory.lasting,
    )
    if memory is not None:
        memory.take_over_buffers(draft)
    return draft


def draft_kv_shape(draft: Draft | None, dtype: torch.dtype) -> KVShape | None:
    """What the draft stores per token; None: no draft."""
    if draft is None:
        return None
    shape = draft.shape
    return KVShape(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype)


def draft_windows(draft: Draft | None, max_drafts: int) -> tuple[int | None, ...]:
    """How far the draft's layers look back from the target's next position; (): no draft. It computes what
    the last step has accepted once more."""
    if draft is None:
        return ()
    windows = draft.shape.layer_windows
    return tuple([None if width is None else width + 1 + max_drafts for width in windows])


def draft_parts(
    draft: Draft | None, num_pages: int, config: ResolvedConfig, arenas: Arenas
) -> DraftParts | None:
    """The draft with its KV cache, which has as many pages as the target's."""
    shape = draft_kv_shape(draft, config.dtype)
    if draft is None or shape is None:
        return None
    allocate = arenas("kv_cache", config.device)
    return DraftParts(draft, KVCache(shape, num_pages, config.device, allocate, name="draft_kv"))
