"""Quotas of a key: requests and tokens of the last minute, and requests at once."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

WINDOW_SECONDS = 60
RATE_HEADERS = [
    f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")
]
"""Under OpenAI's names."""


class Refusal(Exception):
    """A tenant may not ask for this, or not now."""

    def __init__(
        self, status: int, message: str, *, code: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """`status`: of the answer over HTTP."""
        super().__init__(message)
        self.status, self.code, self.headers = status, code, dict(headers or {})


@dataclass(frozen=True)
class Limits:
    """What a key may use; None: without a limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    requests_at_once: int | None = None

    @property
    def are_any(self) -> bool:
        """Whether there is a limit."""
        return self != Limits()


class Window:
    """Amounts of the last minute, to the second."""

    def __init__(self) -> None:
        self._amounts: deque[tuple[int, int]] = deque()
        """By the second in which they end to count; the oldest first."""
        self._total = 0

    def used(self, now: float) -> int:
        """Returns what was added in the last minute."""
        while self._amounts and self._amounts[0][0] <= now:
            self._total -= self._amounts.popleft()[1]
        return self._total

    def add(self, amount: int, now: float) -> None:
        """Count an amount."""
        end = math.ceil(now) + WINDOW_SECONDS
        if self._amounts and self._amounts[-1][0] == end:
            amount_before = self._amounts.pop()[1]
            self._amounts.append((end, amount_before + amount))
        else:
            self._amounts.append((end, amount))
        self._total += amount

    def seconds_until(self, room: int, now: float) -> int:
        """Returns in how many seconds no more than `room` of what was added still counts."""
        left = self.used(now)
        wait = 0
        for end, amount in self._amounts:
            if left <= room:
                break
            left -= amount
            wait = max(1, math.ceil(end - now))
        return wait


class Quota:
    """Quotas of one key, and what is used of them."""

    def __init__(self, name: str, limits: Limits) -> None:
        self.limits = limits
        """May be replaced; what was used still counts."""
        self.refused: Counter[str] = Counter()
        """Requests that were refused, by the limit."""
        self._name = name
        self._requests, self._tokens = Window(), Window()
        self._at_once = 0

    def begin(self) -> None:
        """A request begins: 429 if it is one too many. It must `end`."""
        limits, now = self.limits, time.monotonic()
        if limits.requests_at_once is not None and self._at_once >= limits.requests_at_once:
            raise self._refusal("requests_at_once", limits.requests_at_once, self._at_once, 1)
        if limits.requests_per_minute is not None:
            used = self._requests.used(now)
            if used >= limits.requests_per_minute:
                wait = self._requests.seconds_until(limits.requests_per_minute - 1, now)
                raise self._refusal("requests_per_minute", limits.requests_per_minute, used, wait)
        if limits.tokens_per_minute is not None:
            self._check_tokens(limits.tokens_per_minute, 1, now)
        self._requests.add(1, now)
        self._at_once += 1

    def end(self) -> None:
        """A request has ended."""
        self._at_once -= 1

    def take_prompt(self, tokens: int, completions: int) -> None:
        """Charge a request for its prompts: 429 if there is no room for them now, 400 if there never is."""
        limit = self.limits.tokens_per_minute
        now = time.monotonic()
        if limit is not None:
            if (least := tokens + completions) > limit:
                message = (
                    f"the request has {tokens:,} prompt tokens and asks for {completions:,} completions: at "
                )
                message += f"least {least:,} tokens, and the key {self._name!r} may use {limit:,} per minute"
                raise Refusal(400, message, code="request_exceeds_quota")
            self._check_tokens(limit, tokens + completions, now)
        self._tokens.add(tokens, now)

    def take_token(self) -> None:
        """Charge a token that was generated."""
        if self.limits.tokens_per_minute is not None:
            self._tokens.add(1, time.monotonic())

    @property
    def headers(self) -> dict[str, str]:
        """What is left, under OpenAI's names."""
        limits, now = self.limits, time.monotonic()
        found: dict[str, str] = {}
        for name, limit, window in (
            ("requests", limits.requests_per_minute, self._requests),
            ("tokens", limits.tokens_per_minute, self._tokens),
        ):
            if limit is not None:
                found[f"x-ratelimit-limit-{name}"] = str(limit)
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, limit - window.used(now)))
                found[f"x-ratelimit-reset-{name}"] = f"{window.seconds_until(0, now)}s"
        return found

    def _check_tokens(self, limit: int, wanted: int, now: float) -> None:
        if (used := self._tokens.used(now)) + wanted > limit:
            wait = self._tokens.seconds_until(limit - wanted, now)
            raise self._refusal("tokens_per_minute", limit, used, wait)

    def _refusal(self, which: str, limit: int, used: int, wait: int) -> Refusal:
        self.refused[which] += 1
        message = f"{which} of the key {self._name!r}: the limit is {limit:,}, {used:,} are used: "
        message += f"try again in {wait} s"
        headers = {"Retry-After": str(wait), **self.headers}
        return Refusal(429, message, code="rate_limit_exceeded", headers=headers)
