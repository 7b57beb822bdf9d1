"""Which rule chooses the kernel of an operation: keyed by operation, weight or cache format, and GPU.

    operation           format   shape                        who decides, the first that knows it
    linear              plain    MatrixShape, tokens          user's table, package's table, rule
    attention.decode    plain    requests, heads, queries     rule
    attention.prompt    plain    tokens, requests, heads      rule
    lora                plain    tokens, width                rule

A rule is a function from shape and GPU to a tile. Nothing is timed while serving: a rule was derived from
measurements on the GPUs that it names, and on any other one the start-up log says that it is a guess.

Each operation is a folder of this package whose module `choice` registers its rules when it is imported. So a
new operation, a new format of an operation or a new GPU is a rule in one folder, and nobody lists them here.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .gpu import Gpu

PLAIN = "plain"
"""The format of one tensor in the dtype of the model."""


class FormatError(ValueError):
    """No kernel of an operation reads what is stored in this format."""


@dataclass(frozen=True)
class Rule:
    """How tiles are chosen for an operation in one format on one architecture."""

    operation: str
    format: str
    architecture: tuple[int, int] | None
    """A compute capability; None: all that have no rule of their own."""
    choose: Callable[..., Any]
    """Takes what is known of the shape, then the GPU."""
    measured_on: tuple[Gpu, ...]
    """GPUs whose measurements the rule was derived from."""
    advice: str = ""
    """What a user of another GPU can do about it."""


_rules: dict[tuple[str, str, tuple[int, int] | None], Rule] = {}


def register(rule: Rule) -> Rule:
    """Adds a rule; there is one for each key."""
    key = rule.operation, rule.format, rule.architecture
    assert key not in _rules, key
    _rules[key] = rule
    return rule


def rule_for(operation: str, format: str, gpu: Gpu) -> Rule:
    """Returns the rule of this architecture, else that of all others."""
    for architecture in (gpu.capability, None):
        rule = _rules.get((operation, format, architecture))
        if rule is not None:
            return rule
    raise FormatError(
        f"no kernel of {operation} takes the format {format!r} on {gpu}; formats: "
        + ", ".join(formats_of(operation))
    )


def formats_of(operation: str) -> list[str]:
    """Returns the formats for which an operation has kernels."""
    return sorted({format for known, format, _ in _rules if known == operation})


def unmeasured(gpu: Gpu) -> list[str]:
    """Returns a line for the start-up log for each rule that is in use on this GPU without having been
    measured there."""
    _import_operations()
    told = []
    for operation, format in sorted({(operation, format) for operation, format, _ in _rules}):
        rule = rule_for(operation, format, gpu)
        if gpu not in rule.measured_on:
            told.append(
                f"{operation} ({format}): kernels are chosen by rules that were measured on "
                f"{', '.join(map(str, rule.measured_on))}, not on {gpu}: results are right, the speed is "
                f"unknown{rule.advice}"
            )
    return told


@cache
def _import_operations() -> None:
    """Imports the module `choice` of every operation, which registers its rules."""
    package = __name__.rpartition(".")[0]
    for folder in pkgutil.iter_modules([str(Path(__file__).parent)]):
        name = f"{package}.{folder.name}.choice"
        if folder.ispkg and find_spec(name) is not None:
            import_module(name)
