"""Masks on their way to a GPU: nobody waits for them, and none is overwritten before it has arrived."""

from typing import Any

import numpy as np
import torch

from ostinato.engine.sampling.asked_rows import TokenMasks
from ostinato.text.grammar import Mask

VOCAB, ROWS = 151_936, 257


class Numbered:
    """A grammar whose masks are numbers."""

    def __init__(self, number: int) -> None:
        self.number = number

    def fill(self, mask: Mask) -> None:
        mask[:] = self.number


def follow(masks: TokenMasks, row: int, number: int) -> None:
    grammar: Any = Numbered(number)
    masks.follow(row, grammar)


def test_masks_of_many_steps_arrive_in_order_behind_a_busy_device(device: torch.device) -> None:
    """Without a synchronisation that torch knows of."""
    masks = TokenMasks(ROWS, VOCAB, device)
    follow(masks, 1, 7)
    masks.send()  # pinned memory is allocated
    torch.cuda.synchronize()
    draw, expected = np.random.default_rng(1), np.full(ROWS, -1)
    expected[1] = 7
    found, wanted = [], []
    torch.cuda._sleep(200_000_000)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(12):
            for row in draw.permutation(np.arange(1, ROWS))[: draw.integers(1, 40)].tolist():
                expected[row] = 1000 * step + row
                follow(masks, row, 1000 * step + row)
            masks.send()
            found.append(masks.tensor[:, ::613].clone())
            wanted.append(expected.copy())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for tensor, numbers in zip(found, wanted, strict=True):
        assert np.array_equal(tensor.cpu().numpy(), np.repeat(numbers[:, None], tensor.size(1), axis=1))
