"""Who drafts tokens, by what was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .eagle_graphs import EagleGraphManager
from .ngram_drafter import NgramDrafter
from .speculation import Speculation

if TYPE_CHECKING:
    from ..stepping.model_runner import ModelRunner


def make_speculation(runner: ModelRunner) -> Speculation | None:
    """Speculation on the rows of a runner; None where nobody asked for it."""
    config = runner.config.speculation
    if config is None:
        return None
    if config.method == "ngram":
        return Speculation(runner, config, NgramDrafter(runner, config))
    assert runner.draft is not None
    return Speculation(runner, config, EagleGraphManager(runner, config, runner.draft))
