"""Masks of rows arrive on the device: all that changed, nothing else, also after a failure."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from ostinato.engine.sampling.asked_rows import TokenMasks
from ostinato.text.grammar import Mask

VOCAB, WORDS = 70, 3


class Fixed:
    """A grammar whose next mask is given."""

    def __init__(self, *words: int) -> None:
        self.words = words

    def fill(self, mask: Mask) -> None:
        mask[:] = self.words


def make_masks() -> TokenMasks:
    return TokenMasks(5, VOCAB, torch.device("cpu"))


def follow(masks: TokenMasks, row: int, *words: int) -> None:
    grammar: Any = Fixed(*words)
    masks.follow(row, grammar)


def rows_of(masks: TokenMasks) -> list[list[int]]:
    found: list[list[int]] = masks.tensor.tolist()
    return found


def test_rows_are_free_until_they_follow_a_grammar_and_again_behind_it() -> None:
    masks = make_masks()
    free = [-1] * WORDS
    assert rows_of(masks) == [free] * 5
    follow(masks, 2, 1, 2, 3)
    follow(masks, 4, 4, 5, 6)
    assert rows_of(masks) == [free] * 5, "nothing arrives before send"
    masks.send()
    assert rows_of(masks) == [free, free, [1, 2, 3], free, [4, 5, 6]]
    masks.allow_all(2)
    masks.allow_all(3)
    masks.send()
    assert rows_of(masks) == [free, free, free, free, [4, 5, 6]]


def test_only_what_changed_is_sent() -> None:
    masks, sent = make_masks(), []
    fill = masks._buffers.fill

    def noted(batch: Any, *args: Any) -> None:
        sent.append(batch["rows"].tolist())
        fill(batch, *args)

    with patch.object(masks._buffers, "fill", noted):
        for first in (1, 1, 7, 7):
            follow(masks, 1, first, 2, 3)
            follow(masks, 3, 5, 5, 5)
            masks.send()
        masks.allow_all(1)
        masks.allow_all(2)
        masks.send()
        follow(masks, 3, -1, -1, -1)  # a grammar that allows everything
        masks.send()
        masks.allow_all(3)
        masks.send()
    assert sent == [[1, 3], [1], [1], [3]]
    assert rows_of(masks) == [[-1] * WORDS] * 5


@pytest.mark.parametrize("is_after", [False, True])
def test_what_could_not_be_sent_is_sent_next_time(is_after: bool) -> None:
    masks = make_masks()
    fill = masks._buffers.fill

    def failing(*args: Any) -> None:
        if is_after:
            fill(*args)
        raise KeyboardInterrupt

    follow(masks, 1, 1, 2, 3)
    with patch.object(masks._buffers, "fill", failing), pytest.raises(KeyboardInterrupt):
        masks.send()
    follow(masks, 1, 1, 2, 3)
    follow(masks, 2, 4, 4, 4)
    masks.send()
    assert rows_of(masks)[1:3] == [[1, 2, 3], [4, 4, 4]]


def test_what_is_set_for_a_while_is_undone() -> None:
    masks = make_masks()
    follow(masks, 1, 1, 2, 3)
    masks.send()
    with masks.unchanged():
        masks.allow_all(1)
        follow(masks, 2, 9, 9, 9)
        masks.send()
    assert rows_of(masks)[1:3] == [[1, 2, 3], [-1] * WORDS]
    masks.allow_all(1)
    masks.send()
    assert np.all(masks.tensor.numpy() == -1)
