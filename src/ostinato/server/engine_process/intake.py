"""Requests that have arrived and that the scheduler does not know yet, by fair shares of their tenants.

Note [Intake]
The scheduler gets a full batch of waiting requests ahead, and everything else waits here: a request is a
handful of numbers in a group of up to 128 completions until its turn comes. So however much one tenant sends,
what another one sends is in the scheduler before the next step, which then makes way for it (Note [Shares of
tenants] in engine/scheduling/fair_shares.py).

- Requests that wait in the scheduler for something else than their turn (a grammar, an adapter) do not count
  as waiting, and keep nobody here.
- Each tenant may have its share of the slots waiting in the scheduler, even if others have filled it.
- A tenant is charged for its prompts when they are handed over, those of one group once, and for each token.
- Requests count as arrived when they arrived here, for their times and for a drain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ostinato.engine.scheduling.drain import Announced
from ostinato.engine.scheduling.scheduler import Scheduler
from ostinato.engine.token_ids import IntArray

from ..tenants.fair_queue import FairQueue
from ..wire.messages import Embed, Generate, News

FEED_SECONDS = 0.02
"""After which a step comes before more requests are handed over."""


class Group:
    """The completions of one prompt, or an embedding, as far as they wait here."""

    def __init__(self, command: Generate | Embed, announced: Announced, seeds: Sequence[int] | None) -> None:
        self.command = command
        self.announced = announced
        self.seeds = seeds
        """Of completions that have none; None: they need none."""
        self.prompt: IntArray | None = None
        """The prompt as an array, once it was made."""
        self.arrived = time.perf_counter()
        self.left = list(range(_num(command) - 1, -1, -1))
        """Numbers of those that wait, the next one last."""

    @property
    def ids(self) -> list[int]:
        """Ids of those that wait."""
        return [self.command.id + number for number in reversed(self.left)]


class Intake:
    """Hands requests over to the scheduler of an engine."""

    def __init__(
        self, scheduler: Scheduler, hand_over: Callable[[Group, int], News | None], seed: int | None
    ) -> None:
        """`hand_over`: queues one completion of a group, by its number; returns news if it is refused."""
        self._scheduler, self._hand_over = scheduler, hand_over
        self._queue = FairQueue[Group]()
        self._groups: dict[int, Group] = {}
        """By the ids of what waits."""
        self._slots = scheduler.config.max_running
        # Requests without a seed get one from here: a run with the same requests repeats itself.
        self._seeds = np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def ids(self) -> list[int]:
        """Ids of all that wait, in the order of their arrival."""
        return sorted(self._groups)

    @property
    def adapters(self) -> set[str]:
        """Names of the adapters of all that wait."""
        return {group.command.adapter for group in self._queue if group.command.adapter is not None}

    def add(self, command: Generate | Embed) -> None:
        """Take in what has arrived."""
        seeds = None
        if isinstance(command, Generate) and command.params.seed is None and not command.params.is_greedy:
            seeds = self._seeds.integers(2**62, size=command.num).tolist()
        group = Group(command, self._scheduler.arrivals.announce(), seeds)
        self._groups.update(dict.fromkeys(group.ids, group))
        is_served = self._scheduler.serves(command.tenant)
        self._queue.add(command.tenant, group, command.weight, is_served=is_served)

    def feed(self) -> list[News]:
        """Hand over what the scheduler has room for, or as much of it as can be done in a short time; returns
        news of those that are refused."""
        told: list[News] = []
        if not self._groups:
            return told
        until = time.monotonic() + FEED_SECONDS
        while (tenant := self._next()) is not None:
            group = self._queue.first_of(tenant)
            refused = self._take_first(group)
            if refused is not None:
                told.append(refused)
            if time.monotonic() >= until:
                break
        return told

    @property
    def can_feed(self) -> bool:
        """Whether the scheduler has room for something that waits here."""
        return bool(self._groups) and self._next() is not None

    def withdraw(self, id: int) -> bool:
        """Take one out that nobody wants any more. False if it does not wait here."""
        group = self._groups.pop(id, None)
        if group is None:
            return False
        group.left.remove(id - group.command.id)
        if not group.left:
            self._queue.remove(group.command.tenant, group)
            self._scheduler.arrivals.withdraw(group.announced)
        return True

    def charge(self, counts: Mapping[tuple[str, float], int]) -> None:
        """Count tokens that were generated, by tenant and weight."""
        for (tenant, weight), count in counts.items():
            self._queue.charge(tenant, count, weight)

    def _next(self) -> str | None:
        """Returns whose turn it is to hand something over; None: the scheduler has no room."""
        if not self._groups:
            return None
        scheduler = self._scheduler
        waiting, running = scheduler.waiting, scheduler.running
        if len(waiting) + len(running) < 2 * self._slots:
            return self._queue.next()
        # Whose turn it is has its share in the scheduler's queue even if others have filled it. Nobody passes
        # it meanwhile: long answers would get more than their share beside short ones.
        tenant, counts = self._queue.next(), waiting.num_of
        if tenant is None or counts[tenant] >= max(1, self._slots // (len(counts) + 1)):
            return None
        return tenant

    def _take_first(self, group: Group) -> News | None:
        command, number = group.command, group.left.pop()
        del self._groups[command.id + number]
        is_last = not group.left
        if not number:  # the other completions find the prompt in the prefix cache
            self._queue.charge(command.tenant, len(command.prompt_ids), command.weight)
        if is_last:
            self._queue.remove(command.tenant, group)
        with self._scheduler.arrivals.arrival(group.announced, is_last=is_last):
            return self._hand_over(group, number)


def _num(command: Generate | Embed) -> int:
    return command.num if isinstance(command, Generate) else 1
