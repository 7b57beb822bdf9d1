"""Top-k, top-p and min-p: where each row of logits is cut.

All three keep the front of the tokens ordered from likely to unlikely, the smaller id first among equal
logits. So a row is cut at one token: kept are those with a larger logit, and of those with the same logit the
ids up to its own. top_k = 1 is therefore greedy, equal logits included, and exactly k tokens stay.

Top-p counts the probabilities of what top-k left, in float32: a token stays if those before it sum to less
than top_p. Sums that come within a few 1e-6 of top_p may be decided either way. Min-p keeps logits from
`best + temperature * log(min_p)` on, equal ones together. The best token always stays. Greedy rows are whole.

Here the rows are sorted; on a GPU `triton_cuts` finds the cut without.
"""

import torch
from torch import Tensor

from ...constants import GREEDY_BELOW


def reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """(float32 [n], int32 [n]): logit and id of the last token of each row of float32 logits [n, vocab].

    A row without a filter, or a greedy one, is cut at -inf.
    """
    vocab = logits.size(1)
    is_greedy = temperature < GREEDY_BELOW
    heat = torch.where(is_greedy, 1.0, temperature).unsqueeze(1)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocab, device=logits.device)
    dropped = ranks >= torch.where(top_k > 0, top_k, vocab).unsqueeze(1)
    # The best of each row at 0, so that nothing overflows.
    scaled = ((ordered - ordered[:, :1]) / heat).masked_fill(dropped, float("-inf"))
    probabilities = scaled.softmax(-1)
    better = probabilities.cumsum(-1) - probabilities
    # Sums of float32 may pass 1 early: a top_p of 1 must still drop nothing.
    dropped |= (better >= top_p.unsqueeze(1)) & (top_p < 1).unsqueeze(1)
    dropped |= ordered < ordered[:, :1] + heat * min_p.log().unsqueeze(1)
    at = (vocab - dropped.sum(-1) - 1).clamp(min=0).unsqueeze(1)
    whole = is_greedy | (at.squeeze(1) == vocab - 1)
    value = ordered.gather(1, at).squeeze(1).masked_fill(whole, float("-inf"))
    return value, order.gather(1, at).squeeze(1).int().masked_fill(whole, vocab - 1)


def is_kept(logits: Tensor, value: Tensor, last: Tensor) -> Tensor:
    """bool [n, vocab]: which tokens cuts of `reference` leave."""
    ids = torch.arange(logits.size(1), device=logits.device)
    value, last = value.unsqueeze(1), last.unsqueeze(1)
    return (logits > value) | ((logits == value) & (ids <= last))
