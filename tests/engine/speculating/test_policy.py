"""How many drafts a step gets, in worlds where costs and acceptance are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ostinato.engine.speculating.config import SpeculativeConfig, draft_tiers
from ostinato.engine.speculating.policy import DraftPolicy
from ostinato.graphs import Ladder

SIZES = Ladder([1, 8, 64])


def config(drafts: int = 4, **options: Any) -> SpeculativeConfig:
    return SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": drafts, **options})


def live(
    policy: DraftPolicy,
    cost: Callable[[int], float],
    chance: float,
    *,
    size: int = 8,
    steps: int = 400,
    seed: int = 0,
) -> Counter[int]:
    """How often so many drafts were chosen, in a world of these costs and this chance for every draft."""
    generator, chosen = np.random.default_rng(seed), Counter[int]()
    for _ in range(steps):
        drafts = policy.choose(size, size)
        chosen[drafts] += 1
        policy.note_cost(size, drafts, cost(drafts) * generator.uniform(0.98, 1.05))
        if drafts:
            hits = generator.random((size, drafts)) < chance
            policy.note(drafts, hits.cumprod(1).sum(1))
    return chosen


def best(cost: Callable[[int], float], chance: float) -> int:
    return max((0, 1, 2, 4), key=lambda k: sum(chance**i for i in range(k + 1)) / cost(k))


@pytest.mark.parametrize("chance", [0.05, 0.4, 0.7, 0.95])
@pytest.mark.parametrize("each", [0.02, 0.2, 0.6])
def test_what_pays_most_is_found(each: float, chance: float) -> None:
    policy = DraftPolicy(config(), SIZES)
    live(policy, lambda drafts: 1 + each * drafts, chance)
    chosen = live(policy, lambda drafts: 1 + each * drafts, chance, seed=1)

    def worth(drafts: int) -> float:
        return sum(chance**i for i in range(drafts + 1)) / (1 + each * drafts)

    found = sum(worth(drafts) * count for drafts, count in chosen.items()) / chosen.total()
    assert found > 0.95 * worth(best(lambda drafts: 1 + each * drafts, chance))
    # What drafts cost where they do not pay: a trial now and then.
    assert found > 0.98 * worth(0)


def test_a_change_is_seen_from_either_side() -> None:
    policy = DraftPolicy(config(), SIZES)
    live(policy, lambda drafts: 1 + 0.1 * drafts, 0.0)
    assert policy.choose(8, 8) == 0
    chosen = live(policy, lambda drafts: 1 + 0.1 * drafts, 0.95, steps=2000)
    assert chosen[4] > 800
    chosen = live(policy, lambda drafts: 1 + 0.1 * drafts, 0.0, steps=400)
    assert chosen[0] > 200


def test_batches_of_each_size_have_their_own_costs() -> None:
    policy = DraftPolicy(config(), SIZES)
    for _ in range(5):
        live(policy, lambda drafts: 1 + 0.02 * drafts, 0.8, size=1, steps=100)
        live(policy, lambda drafts: 1 + 1.0 * drafts, 0.8, size=60, steps=100)
    assert live(policy, lambda drafts: 1 + 0.02 * drafts, 0.8, size=1, steps=50)[4] >= 40
    assert live(policy, lambda drafts: 1 + 1.0 * drafts, 0.8, size=60, steps=50)[0] >= 40
    assert policy.choose(65, 65) == 0
    assert policy.choose(5, 0) == 0
    assert set(policy.steps_without) == {
        "drafts cost more than they bring",
        "larger batch than max_speculative_requests",
        "no request can accept drafts",
        "tried without drafts",
    }
    found = policy.speed_up(1)
    assert found is not None
    assert 2.5 < found < 3.5


def test_those_who_get_one_token_count_as_such() -> None:
    """One of eight with drafts pays less than eight of eight."""
    policy = DraftPolicy(config(), SIZES)
    live(policy, lambda drafts: 1 + 0.2 * drafts, 0.8)
    assert policy.choose(8, 8) == 4
    assert [policy.choose(8, 1) for _ in range(20)][-1] == 0


def test_a_schedule_and_a_fixed_number_are_obeyed() -> None:
    rows = [[1, 4, 3], [5, 32, 1], [33, 64, 0]]
    scheduled = config(num_speculative_tokens_per_batch_size=rows)
    assert draft_tiers(scheduled) == (1, 3)
    policy = DraftPolicy(scheduled, SIZES)
    assert [policy.choose(size, size) for size in (1, 4, 5, 32, 33, 64)] == [3, 3, 1, 1, 0, 0]
    fixed = config(drafts=5, disable_adaptive=True)
    assert draft_tiers(fixed) == (5,)
    policy = DraftPolicy(fixed, SIZES)
    assert live(policy, lambda drafts: 1 + drafts, 0.0) == {5: 400}
    assert draft_tiers(config(drafts=6)) == (1, 2, 4, 6)
    assert draft_tiers(config(drafts=1)) == (1,)
