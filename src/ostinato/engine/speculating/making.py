"""Construction of speculation from its configuration."""

from __future__ import annotations

from .eagle_graphs import EagleGraphManager
from .ngram_drafter import NgramDrafter
from .speculation import Speculation
from .target import Target


def make_speculation(runner: Target) -> Speculation | None:
    """Speculation on the rows of a runner; None if it is not configured."""
    config = runner.config.speculation
    if config is None:
        return None
    if config.method == "ngram":
        return Speculation(runner, config, NgramDrafter(runner, config))
    assert runner.draft is not None
    return Speculation(runner, config, EagleGraphManager(runner, config, runner.draft))
