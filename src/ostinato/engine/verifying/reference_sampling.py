"""Which tokens may be sampled, in float64 and one request at a time, sharing no code with the graphs.

Written from the specification (in `kernels/sampling`): the order of the steps, a draw that depends only on
seed, position and token, cuts at top-k, top-p and min-p. A graph computes in float32, so if two tokens are
practically equal, or a token is right at a cut, either result is correct.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..parameters.sampling_params import GREEDY_BELOW, SamplingParams

_AT_A_CUT = 1e-4
"""Sums of probabilities, and logits relative to 1 + their size, that count as equal."""
_UINT64 = 1 << 64


def _signed(value: int) -> int:
    """The same 64 bits as a signed number, as torch holds them."""
    value %= _UINT64
    return value - _UINT64 if value >= _UINT64 // 2 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class SampledFrom:
    """What a request's next token is chosen from."""

    params: SamplingParams
    position: int
    """The position of the token."""
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    """What it generated before."""
    banned: Sequence[int] = ()
    allowed: Tensor | None = None
    """bool [vocab], from a grammar."""

    @property
    def heat(self) -> float:
        """The temperature, 0 if greedy."""
        return 0.0 if self.params.temperature < GREEDY_BELOW else self.params.temperature

    def is_right(self, token: int, raw: Tensor) -> bool:
        """Whether this token may have been sampled from float32 logits [vocab]."""
        if not 0 <= token < raw.numel():
            return False
        logits = self._changed(raw.double())
        surely, perhaps = self._kept(logits)
        if not bool(perhaps[token]):
            return False
        scores = logits
        if self.heat:
            scores = logits + self.heat * gumbel(self.params.seed or 0, self.position, raw)
        slack = 1e-4 * (1 + self.heat) + 1e-5 * float(raw.abs().max())
        best = scores.masked_fill(~surely, float("-inf")).max()
        return bool(scores[token] >= best - slack)

    def _changed(self, logits: Tensor) -> Tensor:
        """Bias, bans, penalties and grammar, in this order."""
        params = self.params
        logits = logits.clone()
        for token, bias in (params.logit_bias or {}).items():
            logits[token] += bias
        if self.banned:
            logits[list(self.banned)] = float("-inf")
        if params.has_penalties:
            seen = torch.tensor(sorted({*self.prompt, *self.output}), device=logits.device)
            theirs, factor = logits[seen], params.repetition_penalty
            logits[seen] = torch.where(theirs > 0, theirs / factor, theirs * factor)
            for token in set(self.output):
                times = list(self.output).count(token)
                logits[token] -= params.frequency_penalty * times + params.presence_penalty
        if self.allowed is not None:
            logits[~self.allowed] = float("-inf")
        return logits

    def _kept(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens surely left by the filters, and those possibly left; bool [vocab] each."""
        params = self.params
        possible = logits > float("-inf")
        surely, perhaps = possible.clone(), possible.clone()
        if not self.heat:
            return surely, perhaps
        best = float(logits.max())
        near = _AT_A_CUT * (1 + abs(best))
        is_cut = 0 < params.top_k < logits.numel()
        if is_cut:
            least = float(logits.topk(params.top_k).values[-1])
            surely &= logits > least + near
            perhaps &= logits >= least - near
        if params.top_p < 1:
            # Of what top-k left: exactly k tokens, the smaller ids first among equals.
            order = logits.argsort(descending=True, stable=True)
            left = order[: params.top_k] if is_cut else order
            probabilities = (logits[left] / self.heat).softmax(-1)
            before = probabilities.cumsum(-1) - probabilities
            surely &= _marked(left[before < params.top_p - _AT_A_CUT], logits)
            perhaps &= _marked(left[before < params.top_p + _AT_A_CUT], logits) | (logits >= best - near)
        if params.min_p > 0:
            least = best + self.heat * math.log(params.min_p)
            surely &= logits > least + near
            perhaps &= logits >= least - near
        return surely, perhaps


def gumbel(seed: int, position: int, like: Tensor) -> Tensor:
    """float64 [vocab]: the noise of a draw, by splitmix64's mixer over (seed, position, token)."""
    device = like.device
    key = _mixed(_mixed(torch.tensor(_signed(seed)) + _GOLDEN) + _signed(position * 0x9E3779B97F4A7C15))
    tokens = torch.arange(1, like.numel() + 1, device=device)
    bits = _mixed(key.to(device) + tokens * _GOLDEN)
    uniform = (_shifted(bits, 1) | 1).double() * 2.0**-63
    # The largest float32 below 1.
    uniform = uniform.clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, amount: int) -> Tensor:
    """Shift right, with zeros from the left."""
    return torch.bitwise_right_shift(x, amount) & ((1 << (64 - amount)) - 1)


def _marked(tokens: Tensor, like: Tensor) -> Tensor:
    marks = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
    marks[tokens] = True
    return marks
