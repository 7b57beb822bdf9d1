"""The last tokens of a step's requests.

For a prompt, only the result of its last token is needed: the other tokens matter for their keys and values
only, and after the last layer's attention not even for these.
"""

from dataclasses import dataclass

from torch import Tensor

from ostinato.kernels.lora import Adapters

from .mixing import Attend


@dataclass(frozen=True, eq=False)
class LastTokens:
    """R of the T tokens of a step; the last layer of a model continues with these only."""

    places: Tensor
    """Integers [R]: where they are among the tokens."""

    attend: Attend
    """Like the step's own, from all tokens [T] to attention of these [R, Hq, D]; keys and values of all
    tokens are stored."""

    adapters: Adapters | None = None
    """What is added to the products of these tokens."""
