"""The limits of the scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.graphs.errors import ConfigError


@dataclass(frozen=True)
class SchedulerConfig:
    """The limits of the scheduler."""

    max_running: int
    """Requests that run at the same time; their rows are 1..max_running."""
    max_batched_tokens: int
    """Tokens of one step; at least max_running, so that running requests always fit."""
    max_model_len: int
    """Tokens of a request, prompt and output together."""
    chunked_prefill: bool = True
    """Split prompts over several steps; without it max_batched_tokens must hold the longest request."""
    prefix_caching: bool = True
    """Share pages between requests that begin with the same tokens."""
    shared_prefixes: bool = False
    """Determine what all requests of a decode batch have in common."""
    lookahead: int = 1
    """Steps that may be incomplete when the next one is scheduled; 0 waits for every step."""
    window: int | None = None
    """How many tokens, its own included, a token looks back on at most; None: all before it."""
    max_drafts: int = 0
    """Drafts that a step may verify after the last token of each request. They are computed before it is
    known whether the request gets that long, so it has room for as many after its last position."""

    def __post_init__(self) -> None:
        for name in ("max_running", "max_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_drafts < 0:
            raise ConfigError(f"max_drafts must be at least 0, not {self.max_drafts}")
        if self.lookahead < 0:
            raise ConfigError(f"lookahead must be at least 0, not {self.lookahead}")
        if self.max_batched_tokens < self.max_running:
            raise ConfigError(
                f"max_batched_tokens ({self.max_batched_tokens}) is below max_running ({self.max_running}): "
                "a step must hold one token of every running request; raise the one or lower the other"
            )
        if not self.chunked_prefill and self.max_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"without chunked prefill max_batched_tokens ({self.max_batched_tokens}) must be at least "
                f"max_model_len ({self.max_model_len}), because a prompt runs in one step"
            )


def window_of(layer_windows: Sequence[int | None], max_model_len: int) -> int | None:
    """The widest window of a model; None if a layer sees everything."""
    widths = [max_model_len if width is None else width for width in layer_windows]
    return max(widths) if max(widths) < max_model_len else None
