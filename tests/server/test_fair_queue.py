"""The queue that serves tenants by fair shares, on its own."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.server.tenants.fair_queue import FairQueue
from ostinato.server.tenants.fair_turns import FairTurns
from ostinato.server.tenants.tenant import Tenant, current_tenant


def served(weights: dict[str, float], slots: int, seed: int, steps: int) -> Counter[str]:
    """Tokens of tenants that always want more, on an engine with so many slots."""
    draw = random.Random(seed)
    queue = FairQueue[tuple[str, int]]()
    running: list[tuple[str, int]] = []
    tokens, waiting = Counter[str](), Counter[str]()
    num_items = 0
    prompts = {tenant: draw.choice((1, 20, 100)) for tenant in weights}
    lengths = {tenant: draw.choice((2, 10, 40)) for tenant in weights}
    for _ in range(steps):
        for tenant, weight in weights.items():
            while waiting[tenant] < slots + draw.randrange(slots + 1):
                queue.add(tenant, (tenant, num_items), weight)
                waiting[tenant] += 1
                num_items += 1
        while len(running) < slots:
            item = queue.take()
            if item is None:
                break
            tenant = item[0]
            waiting[tenant] -= 1
            queue.charge(tenant, prompts[tenant], weights[tenant])
            tokens[tenant] += prompts[tenant]
            running.append((tenant, draw.randint(1, 2 * lengths[tenant])))
        assert len(running) == slots or not len(queue), "it gives out whatever there is"
        for tenant, _ in running:
            queue.charge(tenant, 1, weights[tenant])
            tokens[tenant] += 1
        running = [(tenant, left - 1) for tenant, left in running if left > 1]
    return tokens


@settings(max_examples=6, deadline=None)
@given(
    weights=st.lists(st.sampled_from([1.0, 1.0, 2.0, 3.0]), min_size=2, max_size=6),
    seed=st.integers(0, 2**16),
)
def test_shares_are_those_of_the_weights(weights: list[float], seed: int) -> None:
    named = {f"t{at}": weight for at, weight in enumerate(weights)}
    slots = 4
    tokens = served(named, slots, seed, 2000)
    for tenant, weight in named.items():
        due = sum(tokens.values()) * weight / sum(weights)
        longest = 180  # one request more or less: a prompt and an answer
        assert abs(tokens[tenant] - due) <= 0.1 * due + longest, (named, tokens)


def test_who_was_away_neither_earns_nor_owes() -> None:
    queue = FairQueue[int]()
    for item in range(1, 100):
        queue.add("early", item)
        assert queue.take() == item
        queue.charge("early", 1000)
    for item in range(100, 120):
        queue.add("early", item)
        queue.add("late", -item)
    taken = []
    for _ in range(20):
        item = queue.take() or 0
        queue.charge("early" if item > 0 else "late", 1)
        taken.append(item > 0)
    assert sum(taken) == 10, "what it has used while it was alone does not count against it"


def test_nobody_starves_beside_newcomers() -> None:
    queue = FairQueue[str]()
    queue.add("patient", "wanted")
    queue.charge("patient", 5)
    for at in range(1000):
        queue.add(f"new{at}", f"item{at}")
        if queue.take() == "wanted":
            return
        queue.charge(f"new{at}", 3)
    raise AssertionError("it starves")


def test_items_leave_in_the_middle() -> None:
    queue = FairQueue[int]()
    for item in range(6):
        queue.add("a" if item % 2 else "b", item)
    queue.remove("a", 3)
    queue.remove("b", 0)
    assert len(queue) == 4
    assert sorted(queue) == [1, 2, 4, 5]
    assert sorted(queue.take() or 0 for _ in range(4)) == [1, 2, 4, 5]
    assert queue.take() is None


def test_cost_with_ten_thousand_waiting() -> None:
    for num_tenants in (1, 10, 10_000):
        queue = FairQueue[int]()
        began = time.perf_counter()
        for item in range(10_000):
            queue.add(f"t{item % num_tenants}", item)
        for item in range(10_000):
            queue.add(f"t{item % num_tenants}", 10_000 + item)
            taken = queue.take()
            assert taken is not None
            queue.charge(f"t{taken % num_tenants}", 100)
        each = (time.perf_counter() - began) / 40_000
        assert each < 1e-4, f"{1e6 * each:.0f} us with {num_tenants} tenants"


def test_turns_of_tenants_and_of_those_who_leave() -> None:
    order: list[str] = []

    async def use(turns: FairTurns, name: str, cost: int) -> None:
        current_tenant.set(Tenant(name))
        assert turns.has_room(cost)
        async with turns.turn(cost):
            order.append(name)
            await asyncio.sleep(0)

    async def work() -> None:
        turns = FairTurns(1, 100)
        first = [asyncio.create_task(use(turns, "many", 8)) for _ in range(12)]
        await asyncio.sleep(0)
        assert not turns.has_room(100)
        other = asyncio.create_task(use(turns, "one", 40))
        first[1].cancel()
        await asyncio.gather(*first, other, return_exceptions=True)
        await use(turns, "last", 100)

    asyncio.run(work())
    assert order.index("one") <= 2, "it does not wait for all that another one has sent"
    assert order.count("many") == 11
    assert order[-1] == "last", "whoever left has left no place taken"
