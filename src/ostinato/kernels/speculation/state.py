"""What speculation keeps of every request between its steps."""

from typing import NamedTuple

from torch import Tensor

NO_TOKEN = -1
"""In a line of tokens, behind those of a request that are new."""


class SpecState(NamedTuple):
    """By request row; K drafts at most."""

    lengths: Tensor
    """int32 [max_rows]: L, the positions that are in the cache."""
    last_tokens: Tensor
    """int64 [max_rows]: the token at position L; that of `TokenLines`."""
    drafts: Tensor
    """int32 or int64 [max_rows, K]: what may stand behind it."""
    num_accepted: Tensor
    """int32 [max_rows]: drafts that the last verification accepted."""
    limits: Tensor
    """int32 [max_rows]: drafts that a step may accept at most; 0 for requests that are not plain."""
    history: Tensor | None = None
    """int32 [max_rows, positions]: the text, for drafts that are looked up in it."""
