"""The last tokens of a step's requests.

Of a prompt nobody wants to know more than what its last token leads to: the others matter for the keys and
values that they leave, and behind attention of the last layer not even for these.
"""

from dataclasses import dataclass

from torch import Tensor

from ostinato.kernels.lora import Adapters

from .mixing import Attend


@dataclass(frozen=True, eq=False)
class LastTokens:
    """R of the T tokens of a step; the last layer of a model goes on with these alone."""

    places: Tensor
    """Integers [R]: where they are among the tokens."""

    attend: Attend
    """As the step's own, from all tokens [T] to attention of these [R, Hq, D]: keys and values of all are
    kept."""

    adapters: Adapters | None = None
    """What is added to products of these."""
