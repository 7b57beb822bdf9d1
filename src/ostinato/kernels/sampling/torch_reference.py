"""From logits to tokens on the device, in plain torch: static shapes, no host reads, legal in a graph.

The order is that of the HuggingFace processors: bias and penalties on the raw logits, then temperature, then
top-k, top-p over what top-k left, min-p (`filters`). Every setting is a tensor with one value a row, so one
captured graph serves any mix of requests; a row with temperature 0 is greedy. Plain requests have a
temperature and a seed and ask for nothing else: theirs is a path of its own, `plain`. `asking_rows` puts the
rest together, for those who ask.

Note [Counter-based randomness]
A draw depends on (seed, position, token id) and on nothing else: not on the batch, the row, or earlier draws.
So a request gets the same tokens alone or in company, and after being preempted and resumed. Each triple is
hashed to 64 bits by splitmix64's mixer (two multiplications, three xor-shifts, in wrapping int64), which
becomes Gumbel noise g; argmax(logits + temperature * g) is then a sample from softmax(logits / temperature),
with no sum over the vocabulary, no sorted order to agree on and no division: temperature 0 is greedy.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..constants import GREEDY_BELOW
from . import filters

_UINT64 = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15 - _UINT64
_MIX_1 = 0xBF58476D1CE4E5B9 - _UINT64
_MIX_2 = 0x94D049BB133111EB - _UINT64
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities under the model itself, before bias, penalties, temperature and filters."""

    chosen: Tensor
    """float32 [n]: of the chosen tokens."""

    rank: Tensor
    """int64 [n]: 1 plus the number of tokens more likely than the chosen one."""

    top_tokens: Tensor
    """int64 [n, top_n]: the most likely tokens, best first."""

    top: Tensor
    """float32 [n, top_n]: theirs."""


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """int64 [n]: a token for each row of float32 logits [n, vocab]; all else [n], as in `Asked`.

    `positions`: where in their requests the tokens will stand. Each row needs one finite logit at least.
    """
    left = filters.is_kept(logits, *filters.reference(logits, temperature, top_k, top_p, min_p))
    return sample_unfiltered(logits.masked_fill(~left, float("-inf")), temperature, seeds, positions)


def sample_unfiltered(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """int64 [n]: a token for each row of logits, in plain torch."""
    heat = torch.where(temperature < GREEDY_BELOW, 0.0, temperature).unsqueeze(1)
    return (logits + heat * gumbel_noise(seeds, positions, logits.size(-1))).argmax(-1)


def apply_penalties(
    logits: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    generated: Tensor,
    in_prompt: Tensor,
) -> Tensor:
    """Logits [n, vocab] less what the rows' earlier tokens cost; all else by row, as in `Asked`."""
    was_generated = generated > 0
    factor = torch.where(was_generated | in_prompt, repetition.unsqueeze(1), 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency.unsqueeze(1) * generated - presence.unsqueeze(1) * was_generated


def count_tokens(counts: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Add one for each (row, token) to the persistent counts int32 [max_rows, vocab]; row 0 stays as it is.

    Row 0 belongs to padding, and its state is constant.
    """
    places = rows.long() * counts.size(1) + tokens
    counts.view(-1).index_add_(0, places, (rows != 0).to(counts.dtype))


def add_bias(logits: Tensor, token_ids: Tensor, values: Tensor) -> Tensor:
    """Logits plus values float32 [n, width] at token_ids int64 [n, width]; unused places are (0, 0.0)."""
    return logits.scatter_add(1, token_ids, values)


def ban(logits: Tensor, token_ids: Tensor, is_banned: Tensor) -> Tensor:
    """Logits, but -inf at those of token_ids int64 [n, width] for which is_banned [n, width] holds."""
    costs = torch.zeros_like(token_ids, dtype=logits.dtype).masked_fill(is_banned, float("-inf"))
    return add_bias(logits, token_ids, costs)


def allow(logits: Tensor, masks: Tensor) -> Tensor:
    """Logits with -inf for tokens whose bit in masks int32 [n, words] is not set, the lowest bit first."""
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (masks.unsqueeze(-1) >> bits) & 1
    return logits.masked_fill(allowed.flatten(1)[:, : logits.size(1)] == 0, float("-inf"))


def token_logprobs(logits: Tensor, tokens: Tensor, top_n: int) -> Logprobs:
    """Log-probabilities of the chosen tokens int64 [n] and of the `top_n` best, from the raw logits."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, tokens.unsqueeze(1))
    rank = (logprobs > chosen).sum(-1) + 1
    top, top_tokens = logprobs.topk(top_n, dim=-1)
    return Logprobs(chosen.squeeze(1), rank, top_tokens, top)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """float32 [n, vocab_size]: standard Gumbel noise; see Note [Counter-based randomness]."""
    # log1p of small values keeps their precision, and small values are those that win.
    exponential = -torch.log1p(-uniform(seeds, positions, vocab_size))
    return -exponential.log()


def uniform(seeds: Tensor, positions: Tensor, width: int) -> Tensor:
    """float32 [n, width] in the open interval (0, 1), a function of (seed, position, column) alone."""
    row_keys = _mix64(_mix64(seeds.long() + _GOLDEN) + positions.long() * _GOLDEN).unsqueeze(1)
    columns = torch.arange(1, width + 1, device=seeds.device) * _GOLDEN
    bits = _mix64(row_keys + columns)
    # 63 bits, never 0, so small values have all the digits that a float32 can hold.
    fraction = (_shift_right(bits, 1) | 1).float() * 2.0**-63
    return fraction.clamp(max=_LARGEST_BELOW_ONE)


def _mix64(x: Tensor) -> Tensor:
    """splitmix64's finaliser: every bit of an int64 reaches every other."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, amount: int) -> Tensor:
    """Logical shift; `>>` on int64 copies the sign bit."""
    return (x >> amount) & ((1 << (64 - amount)) - 1)
