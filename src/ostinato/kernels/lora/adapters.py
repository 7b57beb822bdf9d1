"""What the forms of a step, and the linear layers in them, are given where adapters are at work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .rows import Rows
from .stack import Stack


class Adapted(NamedTuple):
    """The adapters of one linear layer in a step."""

    stack: Stack
    rows: Rows


class Adapters(NamedTuple):
    """The stacks of a model and the rows of a step."""

    stacks: Mapping[str, Stack]
    """By the names of linear layers (`layers.0.self_attn.qkv_proj`); a layer that is not there has none."""
    rows: Rows

    def of(self, name: str) -> Adapted | None:
        """Those of a linear layer."""
        stack = self.stacks.get(name)
        return None if stack is None else Adapted(stack, self.rows)


def adapted_by(adapters: Adapters | None, name: str) -> Adapted | None:
    """The same where there may be none at all."""
    return None if adapters is None else adapters.of(name)
