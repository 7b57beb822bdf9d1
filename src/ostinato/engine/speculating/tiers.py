"""Numbers of drafts that there are graphs for."""

from .config import SpeculativeConfig


def draft_tiers(config: SpeculativeConfig) -> tuple[int, ...]:
    """In rising order; without 0, which uses the plain graphs."""
    most = config.num_speculative_tokens
    if config.schedule is not None:
        return tuple(sorted({min(drafts, most) for _, _, drafts in config.schedule} - {0}))
    if config.disable_adaptive:
        return (most,)
    powers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return (*powers, most)
