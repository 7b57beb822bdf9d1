"""Rows whose requests ask for nothing, to be changed by whoever needs some that ask."""

from typing import Any

import torch

from ostinato.kernels.sampling.asked import Asked

MOST_BIASES, MOST_BANNED = 8, 4


def nothing_asked(num_rows: int, vocab: int, device: torch.device | str = "cpu", **fields: Any) -> Asked:
    """Greedy, without logprobs; `fields` by name instead."""
    integers = torch.zeros(num_rows, dtype=torch.int32)
    real = torch.zeros(num_rows)
    asked = Asked(
        temperature=real,
        seeds=integers.long(),
        lengths=integers + 1,
        top_k=integers,
        top_p=real + 1,
        min_p=real,
        repetition=real + 1,
        presence=real,
        frequency=real,
        num_biases=integers,
        bias_ids=torch.zeros(num_rows, MOST_BIASES, dtype=torch.int32),
        bias_values=torch.zeros(num_rows, MOST_BIASES),
        banned=torch.full((num_rows, MOST_BANNED), -1, dtype=torch.int32),
        banned_before=integers,
        num_logprobs=integers - 1,
        generated=torch.zeros(num_rows, vocab, dtype=torch.int32),
        in_prompt=torch.zeros(num_rows, vocab, dtype=torch.bool),
        masks=torch.full((num_rows, -(-vocab // 32)), -1, dtype=torch.int32),
    )
    return Asked(*(tensor.to(device) for tensor in asked))._replace(**fields)
