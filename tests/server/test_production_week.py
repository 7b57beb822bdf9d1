"""Minutes of everything that happens to a server in a week, and its end in the middle of it."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from engine.everything_world import World

from .attacks import Footprint, settled
from .imported_late import aiohttp
from .production_week import FLAGS, Week, events, write_other_weights
from .server_process import ServerProcess


async def streams_until_the_end(server: ServerProcess, count: int) -> list[str]:
    """How each of so many long streams ended that were there when the server was told to go."""
    body = {"prompt": [5, 6, 7], "max_tokens": 90, "ignore_eos": True, "stream": True}

    async def one(http: Any) -> str:
        last = "nothing"
        try:
            async with http.post("/v1/completions", json=body) as answer:
                if answer.status != 200:
                    return f"status {answer.status}"
                async for event in events(answer):
                    last = "done" if event is None else "error" if "error" in event else "tokens"
        except aiohttp.ClientError as error:
            return f"{last}, then {type(error).__name__}"
        return last

    async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(60)) as http:
        tasks = [asyncio.create_task(one(http)) for _ in range(count)]
        await asyncio.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        return list(await asyncio.gather(*tasks))


def run_week(place: Path, seconds: float, seed: int) -> Week:
    world = World.of_texts(place)
    other = write_other_weights(world, place / "other")
    with ServerProcess(Path(world.directory), *FLAGS) as server:
        week = Week(server, world, other, random.Random(seed))
        asyncio.run(week.live(seconds / 4))
        server.wait_until_idle()
        before = Footprint.of(server)
        asyncio.run(week.live(seconds))
        server.wait_until_idle()
        settled(server, before, 30, memory=0.2)
        assert "Traceback" not in server.log, server.log
        ended = asyncio.run(streams_until_the_end(server, 12))
        assert set(ended) <= {"done", "error"}, ended
        began = time.monotonic()
        assert server.process.wait(40) == 0
        print("left after", round(time.monotonic() - began, 1), "s;", dict(week.seen))
        assert "Traceback" not in server.log, server.log
    with world.alone.llm:
        assert week.judge() > 20, "nearly nothing could be compared"
    return week


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_week(tmp_path: Path) -> None:
    week = run_week(tmp_path, 120, seed=5)
    assert week.seen["slowest look, ms"] < 5000
    assert {"/sleep", "/pause", "/update_weights_from_disk", "/v1/load_lora_adapter"} <= week.seen.keys()
