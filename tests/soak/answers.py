"""Answers to compare: without what differs each time, streams put together, numbers with a tolerance."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from typing import Any

IGNORED = {
    *("id", "created", "created_at", "completed_at", "call_id", "e2e_latency", "cached_tokens"),
    *("usage_details", "weight_version"),
}
GROWING = {"text", "content", "arguments", "reasoning_content"}
TOLERANCE = 2e-3
"""Of a log probability, or a number of a vector: another batch adds up in another order."""


def essence(answer: Any) -> Any:
    """Returns what of an answer does not depend on when it was asked."""
    if isinstance(answer, dict):
        return {key: essence(value) for key, value in answer.items() if key not in IGNORED}
    if isinstance(answer, list):
        return [essence(value) for value in answer]
    return answer


def is_same(found: Any, expected: Any) -> bool:
    """Compares two essences."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            is_same(value, expected[key]) for key, value in found.items()
        )
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(is_same, found, expected))
    if isinstance(found, float) and isinstance(expected, float):
        return math.isclose(found, expected, abs_tol=TOLERANCE)
    return bool(found == expected)


async def stream_put_together(lines: AsyncIterator[bytes]) -> Any:
    """Returns all events of a stream as one; an error event, or a stream without an end, shows in it."""
    whole: dict[str, Any] = {"is_done": False}
    async for line in lines:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            whole["is_done"] = True
        else:
            _add(whole, json.loads(line[6:]))
    return whole


def _add(whole: dict[str, Any], event: dict[str, Any]) -> None:
    for key, value in event.items():
        before = whole.get(key)
        if isinstance(value, list) and all(isinstance(each, dict) and "index" in each for each in value):
            parts = whole.setdefault(key, {})
            for each in value:
                _add(parts.setdefault(str(each["index"]), {}), each)
        elif isinstance(value, list) and isinstance(before, list):
            whole[key] = before + value
        elif isinstance(value, dict):
            if not isinstance(before, dict):
                whole[key] = {}
            _add(whole[key], value)
        elif key in GROWING and isinstance(before, str) and isinstance(value, str):
            whole[key] = before + value
        elif value is not None or key not in whole:
            whole[key] = value
