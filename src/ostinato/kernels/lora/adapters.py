"""What the forms of a step are given where adapters are at work."""

from collections.abc import Mapping
from typing import NamedTuple

from .rows import Rows
from .stack import Stack


class Adapters(NamedTuple):
    """The stacks of a model and the rows of a step."""

    stacks: Mapping[str, Stack]
    """By the names of linear layers (`layers.0.self_attn.qkv_proj`); a layer that is not there has none."""
    rows: Rows
