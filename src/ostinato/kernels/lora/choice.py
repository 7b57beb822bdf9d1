"""How the work on adapters is divided: by tokens, slots and the matrix, never by who has which adapter.

Tokens of one slot are taken in blocks:

    tokens                  1      2 to 64    to 256    more
    of a block              1      8          16        64
    columns of a CTA    512    512        1,024     all     of `a`; each CTA has sums of its own

How many blocks there are is known on the device alone. Most slots are empty in most steps, and a CTA for
every block that there might be would cost more than the work: so few CTAs take blocks in turn.
"""

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from ..gpu import H200
from ..host_sizes import cdiv, next_power_of_2
from ..registry import PLAIN, Rule, register

_FEW_TOKENS, _MOST_DECODE_TOKENS = 64, 256
TOKENS_TO_COUNT = 128
"""At a time, of all tokens, by the kernel that finds the blocks."""
_MOST_SPLITS = 32
"""Whoever reads sums adds them all."""


class Division(NamedTuple):
    """The work of the CTAs that multiply tokens with `a`."""

    tokens: int
    """Of a block."""
    columns: int
    """At a time."""
    splits: int
    """CTAs that share the columns; whoever reads their sums adds them, in order."""
    num_stages: int
    """Columns that are on their way: 1 where all of a CTA's are, in registers, before it waits."""


def tokens_together(num_tokens: int) -> int:
    """Returns the tokens of a block."""
    if num_tokens == 1:
        return 1  # for which tensor cores would only cost shared memory, of which a GEMV leaves little
    if num_tokens <= _FEW_TOKENS:
        return 8
    return 16 if num_tokens <= _MOST_DECODE_TOKENS else 64


def num_blocks(num_tokens: int, num_slots: int) -> int:
    """Returns the most blocks that tokens can be in: the last of each slot may not be full."""
    size = tokens_together(num_tokens)
    return min(num_tokens, num_tokens // size + min(num_slots, num_tokens))


def programs_for_blocks(num_tokens: int, num_slots: int) -> int:
    """Returns the CTAs that take blocks in turn."""
    return min(num_blocks(num_tokens, num_slots), max(8, num_tokens // tokens_together(num_tokens) + 4))


def division(num_tokens: int, in_features: int) -> Division:
    """For few tokens many CTAs with few columns each: nothing but latency takes time there."""
    size = tokens_together(num_tokens)
    if size > 16:
        return Division(size, 128, 1, num_stages=3)
    size = 1 if num_tokens == 1 else 16  # as many as tensor cores take, be there fewer
    columns, share, num_stages = (512, 512, 1) if num_tokens <= _FEW_TOKENS else (256, 1024, 3)
    return Division(size, columns, min(_MOST_SPLITS, cdiv(in_features, share)), num_stages)


register(Rule("lora", PLAIN, None, division, (H200,)))


def blocks_together(num_tokens: int, num_blocks: int) -> int:
    """Returns the blocks that a CTA of `lora_group` describes, for each chunk of tokens."""
    return max(16, next_power_of_2(cdiv(num_blocks, cdiv(num_tokens, TOKENS_TO_COUNT))))


def adapters_class(num_tokens: int, num_slots: int, widths: Iterable[int]) -> Hashable:
    """Equal for steps whose adapters need the same compiled kernels; inputs of layers are so wide."""
    together = blocks_together(num_tokens, num_blocks(num_tokens, num_slots))
    return together, *(division(num_tokens, width) for width in sorted(widths))
