"""What a soak calls a leak, a lost descriptor or a wrong answer; and a soak of a minute."""

import argparse
import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from .__main__ import soak
from .answers import is_same, stream_put_together
from .processes import judged


def samples(own: Callable[[float], float], descriptors: Callable[[float], int] = lambda t: 30) -> list[Any]:
    """Two hours of an engine like this, beside an HTTP process that is always the same."""
    chance = random.Random(3)

    def member(role: str, own_mib: float, descriptors: int) -> dict[str, Any]:
        fields = {"process": len(role), "began": 1, "resident_mib": 100.0, "threads": 5}
        return {"role": role, "own_mib": own_mib, "descriptors": descriptors, **fields}

    return [
        {
            "seconds": 60.0 * minute,
            "members": [
                member("http", 50.0, 30),
                member("engine", own(minute) + chance.uniform(-0.5, 0.5), descriptors(minute)),
            ],
        }
        for minute in range(1, 121)
    ]


def why(samples: list[Any]) -> str:
    return "; ".join(judged(samples, warm_up=600)["why"])


def test_memory_that_grows_fails() -> None:
    assert "engine: memory grows by 0.1" in why(samples(lambda minute: 100 + 0.12 * minute))


@pytest.mark.parametrize(
    "own",
    [
        lambda minute: 100.0,
        lambda minute: 100 + 0.05 * minute,
        lambda minute: min(100 + 10 * minute, 200),  # it warms up
        lambda minute: 100 + 50 * (minute % 10 == 9),  # something large that was in use just then
    ],
)
def test_memory_that_stays_passes(own: Callable[[float], float]) -> None:
    assert judged(samples(own), warm_up=600)["passed"]


def test_descriptors_that_are_lost_fail() -> None:
    assert "engine: descriptors grew from 30 to" in why(samples(lambda t: 100.0, lambda t: 30 + int(t > 70)))


def test_a_process_that_was_started_again_fails() -> None:
    found = samples(lambda minute: 100.0)
    for sample in found[60:]:
        sample["members"][1]["began"] = 2
    assert "engine: the process did not last" in why(found)


def test_answers_are_compared_with_a_tolerance_for_numbers_alone() -> None:
    answer = {"text": "ab", "numbers": [1.0, -2.5], "count": 3}
    assert is_same({"text": "ab", "numbers": [1.0005, -2.5], "count": 3}, answer)
    others: list[Any] = [
        {"text": "aB"},
        {"numbers": [1.1, -2.5]},
        {"numbers": [1.0]},
        {"count": 4},
        {"more": 1},
    ]
    for other in others:
        assert not is_same(answer | other, answer)


def test_a_stream_is_put_together() -> None:
    async def lines() -> AsyncIterator[bytes]:
        yield b'data: {"choices": [{"index": 1, "delta": {"content": "a"}}], "usage": null}\n'
        yield b"\n"
        yield b'data: {"choices": [{"index": 0, "delta": {"content": "x"}}], "usage": null}\n'
        yield b'data: {"choices": [{"index": 1, "delta": {"content": "b"}, "finish_reason": "stop"}]}\n'
        yield b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n'

    whole = asyncio.run(stream_put_together(lines()))
    assert whole["choices"]["1"] == {"index": 1, "delta": {"content": "ab"}, "finish_reason": "stop"}
    assert whole["choices"]["0"]["delta"]["content"] == "x"
    assert whole["usage"] == {"completion_tokens": 2}
    assert not whole["is_done"], "and that it has no end shows"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_minute(tmp_path: Path) -> None:
    """Too short to judge memory; long enough for every kind of answer."""
    options = argparse.Namespace(
        file=tmp_path / "soak.json", minutes=1.0, warm_up=10.0, every=15.0, rate=20.0, clients=6, seed=2
    )
    result = soak(tmp_path, options)
    assert result["wrong"] == []
    assert result["verdict"]["answers"] > 100
    assert result["verdict"]["why"] == ["too short: fewer than three samples after the warm-up"]
