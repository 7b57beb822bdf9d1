"""Callers' functions that change the logits of a request before a token is drawn from them.

They run on the host between the forward pass and sampling, only for the requests that have them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..scheduling.request import Request
from ..scheduling.token_rules import NOTHING_LEFT


def takes_prompt(function: Callable[..., Any]) -> bool:
    """Whether it takes (prompt ids, token ids so far, logits) instead of the last two."""
    try:
        wanted = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions written in C have none
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len([each for each in wanted if each.kind in kinds and each.default is each.empty]) == 3


@torch.no_grad()
def process(request: Request, logits: Tensor) -> str | None:
    """Apply a request's functions to float32 logits [vocab], in place; returns an error message, or None."""
    output, prompt = request.output_ids, request.prompt_ids.tolist()
    changed = logits
    for function in request.processors:
        name = getattr(function, "__name__", type(function).__name__)
        given = (prompt, output, changed) if takes_prompt(function) else (output, changed)
        try:
            changed = function(*given)
        except Exception as error:  # whatever a caller's function raises is reported to the caller
            return f"logits_processors: {name} raised {type(error).__name__}: {error}"
        if not isinstance(changed, Tensor) or changed.shape != logits.shape:
            found = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            return f"logits_processors: {name} must return logits of shape {tuple(logits.shape)}, not {found}"
    if changed is not logits:
        logits.copy_(changed)
    return None


def what_is_wrong(logits: Tensor, allowed: Tensor) -> str | None:
    """Why no token can be drawn from changed logits [vocab]; `allowed`: bool [vocab], from the masks."""
    best = float(logits.masked_fill(~allowed, -math.inf).max())
    if math.isnan(best) or best == math.inf:
        return f"logits_processors: they returned {best} among the logits"
    return f"logits_processors: {NOTHING_LEFT}" if best == -math.inf else None
