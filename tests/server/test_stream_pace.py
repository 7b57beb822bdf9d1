"""Streams write in rounds: at once where there are few, with pauses where a round is much work."""

import asyncio
import time

import pytest

from ostinato.server.openai import stream_pace
from ostinato.server.openai.stream_pace import StreamPace


async def rounds(num_readers: int, work_seconds: float, tokens: int) -> tuple[list[int], float]:
    """What each reader found when it was woken, over `tokens` tokens for each, and the time it took."""
    pace, waiting, found = StreamPace(), [0] * num_readers, []
    events = [asyncio.Event() for _ in range(num_readers)]

    async def read(number: int) -> None:
        got = 0
        while got < tokens:
            await events[number].wait()
            events[number].clear()
            got += waiting[number]
            found.append(waiting[number])
            waiting[number] = 0
            until = time.thread_time() + work_seconds
            while time.thread_time() < until:
                pass

    readers = [asyncio.create_task(read(number)) for number in range(num_readers)]
    began = time.perf_counter()
    for _ in range(tokens):
        for number in range(num_readers):
            waiting[number] += 1
            pace.wake(events[number])
        await asyncio.sleep(0.002)
    await asyncio.gather(*readers)
    return found, time.perf_counter() - began


def test_few_readers_get_every_token_by_itself() -> None:
    found, _ = asyncio.run(rounds(num_readers=2, work_seconds=0.0, tokens=20))
    assert found == [1] * 40


def test_much_work_makes_rounds_fewer_and_loses_nothing() -> None:
    found, _ = asyncio.run(rounds(num_readers=8, work_seconds=0.0005, tokens=60))
    assert sum(found) == 8 * 60
    assert len(found) < 8 * 60 / 1.5, "a round of 4 ms is followed by a pause of 8 ms: several tokens a round"


def test_a_round_has_all_that_one_message_brought() -> None:
    async def main() -> list[int]:
        pace, order = StreamPace(), []
        events = [asyncio.Event() for _ in range(4)]

        async def read(number: int) -> None:
            await events[number].wait()
            order.append(number)

        readers = [asyncio.create_task(read(number)) for number in range(4)]
        await asyncio.sleep(0)
        for event in events:
            pace.wake(event)
        assert not any(event.is_set() for event in events), "nobody is woken in the middle of the news"
        await asyncio.gather(*readers)
        return order

    assert sorted(asyncio.run(main())) == [0, 1, 2, 3]


def test_pauses_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_pace, "LONGEST", 0.005)
    monkeypatch.setattr(stream_pace, "PAUSE", 1000.0)
    found, seconds = asyncio.run(rounds(num_readers=2, work_seconds=0.001, tokens=10))
    assert sum(found) == 20
    assert seconds < 2
