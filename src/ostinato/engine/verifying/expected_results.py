"""The reference's results for the made requests, computed once for all graphs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ostinato.models.transformer import Transformer

from .borrowed_pages import BorrowedPages, relative_errors
from .made_inputs import MadeAdapters, MadeRequest, MadeStep
from .reference_model import ReferenceModel, exact_products

LEAST_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Relative errors that are fine in any model. Float32's is mostly for angles: the table's are products of
float32, and at position 8000 off by 5e-4 radians."""
MOST_TOLERANCE = 0.3
"""If rounding alone does more than that to a model, its numbers show no fault."""
TIMES_ROUNDING = 3.0
"""Kernels round at other points than the reference, and add in another order: they may be this much further
from float32 than the reference is when it rounds. Transformers' own bf16 is within a factor of 1.5."""
_ROUNDED_TOKENS = 256


class ExpectedResults:
    """Hidden states, logits, keys and values of every token of the made requests."""

    def __init__(
        self,
        model: Transformer,
        requests: Sequence[MadeRequest],
        pages: BorrowedPages,
        adapters: MadeAdapters | None = None,
    ) -> None:
        """Compute; `pages` learn what belongs into them."""
        self._reference = ReferenceModel(model, added=None if adapters is None else adapters.added)
        of_each = None if adapters is None else [adapters.slot_of(request) for request in requests]
        self._has_logits = model.config.has_lm_head
        device = model.embed_tokens.weight.device
        slots = np.concatenate([request.slots(0, request.length) for request in requests])
        places = torch.from_numpy(slots).to(device)

        def keep(layer: int, keys: Tensor, values: Tensor) -> None:
            pages.expect(layer, places, keys, values)

        with exact_products():
            self._hidden = self._reference.hidden_states(_histories(requests), keep, of_each)
        self._logits: dict[int, Tensor] = {}

    def hidden(self, step: MadeStep) -> Tensor:
        """float32 [T, H] of the step's tokens."""
        tokens = [np.arange(part.start, part.end) + part.request.begin for part in step.parts]
        return self._hidden.index_select(0, torch.from_numpy(np.concatenate(tokens)).to(self._hidden.device))

    def logits(self, step: MadeStep) -> Tensor:
        """float32 [R, vocab] after the last token that each request has in the step."""
        tokens = [part.request.begin + part.end - 1 for part in step.parts]
        missing = sorted({token for token in tokens if token not in self._logits})
        if missing:
            with exact_products():
                chosen = self._hidden[torch.tensor(missing, device=self._hidden.device)]
                self._logits |= zip(missing, self._reference.logits(chosen), strict=True)
        return torch.stack([self._logits[token] for token in tokens])


def rounding_errors(
    model: Transformer, requests: Sequence[MadeRequest], dtype: torch.dtype
) -> dict[str, float]:
    """How far rounding alone takes hidden states, logits, keys and values from float32, at most."""
    if dtype is torch.float32:
        return {}
    chosen: list[list[int]] = []
    for history in _histories(requests):
        chosen.append(history[: _ROUNDED_TOKENS - sum(map(len, chosen))])
        if sum(map(len, chosen)) == _ROUNDED_TOKENS:
            break
    exact, rounded = ReferenceModel(model), ReferenceModel(model, dtype)
    stored: list[Tensor] = []
    kv_error = 0.0

    def keep(layer: int, keys: Tensor, values: Tensor) -> None:
        stored.extend([keys.flatten(1), values.flatten(1)])

    def compare(layer: int, keys: Tensor, values: Tensor) -> None:
        nonlocal kv_error
        for new, right in zip((keys, values), stored[2 * layer : 2 * layer + 2], strict=True):
            kv_error = max(kv_error, relative_errors(new.flatten(1), right).max().item())

    with exact_products():
        right = exact.hidden_states(chosen, keep)
        found = rounded.hidden_states(chosen, compare)
        errors = {"kv": kv_error, "hidden": relative_errors(found, right).max().item()}
        if model.config.has_lm_head:
            logits = (reference.logits(x[-64:]) for reference, x in ((rounded, found), (exact, right)))
            errors["logits"] = logit_errors(*logits).max().item()
    return errors


def tolerances(rounding: dict[str, float], dtype: torch.dtype) -> dict[str, float]:
    """The largest relative errors that pass, by what is compared."""
    least = LEAST_TOLERANCE[dtype]
    return {
        what: min(MOST_TOLERANCE, max(least, TIMES_ROUNDING * rounding.get(what, 0.0)))
        for what in ("logits", "hidden", "kv")
    }


def logit_errors(found: Tensor, right: Tensor) -> Tensor:
    """Of each row, relative to the spread of its logits: a constant on all of them changes no token."""
    centre = right.mean(-1, keepdim=True)
    return relative_errors(found - centre, right - centre)


def _histories(requests: Sequence[MadeRequest]) -> list[list[int]]:
    return [request.tokens.tolist() for request in requests]
