"""Is a sequence of tokens what transformers generates greedily? Judged by its own logits."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

TIE = 1e-4
"""Two candidates whose logits in transformers are this close may be told apart either way: another order of
additions in float32 moves a logit of a deep model by about a tenth of that."""


def exact_attention(device: torch.device) -> AbstractContextManager[None]:
    """Attention of transformers in plain products: fused kernels on a GPU round float32 in their own way."""
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else nullcontext()


@torch.no_grad()
def assert_greedy(reference: Any, prompt: Sequence[int], tokens: Sequence[int], *, tie: float = TIE) -> int:
    """Every token is the likeliest after those before it; how many were not, but tied with it.

    One forward pass over the prompt and the tokens. By induction it says that greedy generation gives these
    tokens: each is checked in the context of the ones before, which are the generated ones.
    """
    device = next(reference.parameters()).device
    ids = torch.tensor([[*prompt, *tokens]], device=device)
    with exact_attention(device):
        logits = reference(ids, logits_to_keep=len(tokens) + 1).logits[0, :-1].float()
    best = logits.argmax(-1).tolist()
    ties = 0
    for at, (token, likeliest) in enumerate(zip(tokens, best, strict=True)):
        if token == likeliest:
            continue
        gap = (logits[at, likeliest] - logits[at, token]).item()
        assert gap <= tie, (
            f"token {at} of {len(tokens)} after {len(prompt)} of prompt is {token}, transformers has "
            f"{likeliest}, whose logit is higher by {gap:.2e}; ties are at most {tie}"
        )
        ties += 1
    return ties
