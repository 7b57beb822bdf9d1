"""Many streams at once, some of whose readers leave: nothing lost, nothing doubled, every page free after."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from .imported_late import aiohttp
from .scripted_model import counted
from .server_process import ServerProcess


async def one_stream(client: aiohttp.ClientSession, url: str, number: int, leaves_after: int | None) -> int:
    """Read a stream and check every character; tokens read. Leave after so many, if told to."""
    start, length = chr(33 + number % 90), 20 + number % 41
    body = {"prompt": f"{number} {start}", "max_tokens": length, "temperature": 0, "stream": True}
    text, ends = "", 0
    async with client.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            data = line.decode().removeprefix("data: ").strip()
            if data == "[DONE]":
                assert ends == 1
                break
            if data:
                [choice] = json.loads(data)["choices"]
                text += choice["text"]
                ends += choice["finish_reason"] is not None
                assert counted(start, length).startswith(text)
            if leaves_after is not None and len(text) >= leaves_after:
                answer.close()
                return len(text)
    assert text == counted(start, length), number
    return len(text)


async def load(server: ServerProcess, streams: int, leaving: int) -> None:
    """One round: of `streams` readers, `leaving` go away after a few tokens."""
    every = streams // leaving
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        readers = [
            one_stream(client, server.url, number, number % 7 + 1 if number % every == 0 else None)
            for number in range(streams)
        ]
        read = await asyncio.gather(*readers)
    assert len(read) == streams


def resident_bytes(pid: int) -> int:
    """Memory of a process that is its own."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Private_"))


def test_a_hundred_streams_of_which_twenty_leave(server: ServerProcess) -> None:
    asyncio.run(load(server, 100, 20))
    counters = server.wait_until_idle()
    assert counters["pages_free"] == counters["pages_usable"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_streams_of_which_two_hundred_leave(model: Path) -> None:
    with ServerProcess(model) as server:
        sizes = []
        for _ in range(3):
            asyncio.run(load(server, 1000, 200))
            server.wait_until_idle()
            sizes.append(resident_bytes(server.process.pid) + resident_bytes(server.engine_pid))
        print("private bytes after each round:", sizes)
        assert sizes[2] <= sizes[1] * 1.05
        finished = server.get("/stats").json()["finished"]
        assert sum(finished.values()) == 3000
        assert finished["length"] >= 2400
