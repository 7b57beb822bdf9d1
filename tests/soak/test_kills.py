"""kill -9 of any process of a server at random moments, under load.

No client sees a 500: an answer is right, or a 503 with Retry-After, or a stream that ends with an error
event; a connection breaks only when the HTTP process itself was killed. What was killed comes back, and
nothing is left when the HTTP process goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from grammars.processes import is_alive
from server.imported_late import aiohttp
from server.server_process import ServerProcess

from .answers import essence, is_same, stream_put_together
from .processes import Member, group
from .questions import Question, all_questions, as_client, write_model

CLIENTS = 6
BACK_SECONDS = 120.0
"""In which a server is whole again."""
ENGINE_KILLS = 3
"""Of one server: the pauses before another engine double, and after five it gives up."""


@dataclass
class Fire:
    """A server whose processes are killed under its clients."""

    chance: random.Random
    questions: list[Question]
    right: dict[Question, Any] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[Any] = field(default_factory=list)
    is_over: bool = False
    """The HTTP process is about to be killed: connections may break."""

    async def learn(self, url: str) -> None:
        """Asks every question while nothing happens."""
        async with session(url) as http:
            for question in self.questions:
                if question not in self.right:
                    status, self.right[question], _ = await ask(http, question)
                    assert status == question.status, (question, self.right[question])

    async def client(self, url: str) -> None:
        """Asks one question after the other until the server is killed."""
        async with session(url) as http:
            while True:
                question = self.chance.choice(self.questions)
                try:
                    status, answer, retry_after = await ask(http, question)
                except (aiohttp.ClientError, OSError, ValueError) as error:
                    if not self.is_over:
                        self.wrong.append((question.name, f"{type(error).__name__}: {error}"))
                    return
                self.judge(question, status, answer, retry_after)
                await asyncio.sleep(0.2 if status == 503 else 0)

    def judge(self, question: Question, status: int, answer: Any, retry_after: str | None) -> None:
        if status == question.status and is_same(answer, self.right[question]):
            self.seen["right"] += 1
        elif status == 503 and (retry_after or "").isdigit() and "error" in answer:
            self.seen["503"] += 1
        elif status == 200 and answer.get("error", {}).get("type") == "service_unavailable_error":
            self.seen["stream with an error"] += 1
            if answer["is_done"]:
                self.wrong.append((question.name, "an error, and then [DONE]", answer))
        else:
            self.wrong.append((question.name, status, answer, retry_after))

    async def kills(self, server: ServerProcess, roles: list[str]) -> None:
        """One process of each of these roles after the other, the HTTP process last."""
        clients = [asyncio.create_task(self.client(server.url)) for _ in range(CLIENTS)]
        try:
            for role in roles:
                await asyncio.sleep(self.chance.uniform(0, 0.6))
                await self.kill(server, role)
                # Sometimes the next one is hit while this one is on its way back.
                if self.chance.random() < 0.7:
                    await asyncio.to_thread(wait_until_whole, server)
            await asyncio.sleep(self.chance.uniform(0, 0.6))
            self.is_over = True
            server.process.kill()
            self.seen["killed: http"] += 1
            await asyncio.wait_for(asyncio.gather(*clients), 20)
        finally:
            self.is_over = False
            for client in clients:
                client.cancel()

    async def kill(self, server: ServerProcess, role: str) -> None:
        end = time.monotonic() + 5
        while not (found := [each for each in group(server.process.pid) if each.role == role]):
            if time.monotonic() > end:
                role = "guard"  # nobody has had work for the other one
            await asyncio.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.chance.choice(found).process, signal.SIGKILL)
            self.seen[f"killed: {role}"] += 1


async def ask(http: Any, question: Question) -> tuple[int, Any, str | None]:
    headers = {"Content-Type": "application/json"} | as_client(question.key)
    async with http.post(question.path, data=question.content, headers=headers) as answer:
        if answer.content_type == "text/event-stream":
            return answer.status, essence(await stream_put_together(answer.content)), None
        found = essence(json.loads(await answer.text()))
        return answer.status, found, answer.headers.get("Retry-After")


def session(url: str) -> Any:
    return aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(60))


def wait_until_whole(server: ServerProcess) -> None:
    """The engine serves, and there is a guard."""
    end = time.monotonic() + BACK_SECONDS
    while True:
        roles = {each.role for each in group(server.process.pid) if is_alive(each.process)}
        if server.get("/health").status_code == 200 and {"engine", "guard"} <= roles:
            return
        assert time.monotonic() < end, (roles, server.log)
        assert server.process.poll() is None, server.log
        time.sleep(0.1)


def leftovers(members: list[Member], files: set[str], sockets: set[str]) -> list[str]:
    """Returns what is still there of a group: processes, sockets, files in memory or on disk."""
    found = [f"{each.role} {each.process}" for each in members if is_alive(each.process)]
    bound = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    return [*found, *(sockets & bound), *(file for file in files if Path(file).exists())]


def belongings(members: list[Member], place: Path) -> tuple[set[str], set[str]]:
    """Returns the inodes of a group's sockets, and its open files in shared memory or in `place`."""
    files, sockets = set(), set()
    for each in members:
        for link in Path(f"/proc/{each.process}/fd").glob("*"):
            with contextlib.suppress(OSError):
                target = os.readlink(link)
                if target.startswith("socket:["):
                    sockets.add(target[8:-1])
                elif target.startswith("/dev/shm/"):
                    files.add(target)
    return files, sockets


def rounds(chance: random.Random, kills: int) -> Iterator[list[str]]:
    """Roles for one server after the other, so many kills in all; the HTTP process ends each."""
    while kills > 0:
        roles = ["engine"] * chance.randint(1, ENGINE_KILLS)
        roles += chance.choices(["grammars", "grammar processes", "texts", "guard", "resource tracker"], k=5)
        chance.shuffle(roles)
        yield (roles := roles[: kills - 1])
        kills -= len(roles) + 1


def run(place: Path, monkeypatch: pytest.MonkeyPatch, questions: list[Question], chosen: Any) -> Fire:
    flags = write_model(place)
    fire = Fire(random.Random(7), questions)
    for number, roles in enumerate(chosen):
        folder = place / f"temporary-{number}"
        folder.mkdir()
        monkeypatch.setenv("TMPDIR", str(folder))
        with ServerProcess(None, *flags, bare=True, start_seconds=200) as server:
            asyncio.run(fire.learn(server.url))
            members = group(server.process.pid)
            files, sockets = belongings(members, folder)
            asyncio.run(fire.kills(server, roles))
            server.process.wait()
            end = time.monotonic() + 5
            while left := leftovers(members, files, sockets):
                assert time.monotonic() < end, left
                time.sleep(0.05)
            assert "Traceback" not in server.log, server.log
        assert not [path for path in folder.rglob("*") if path.is_file()]
        print(dict(fire.seen), fire.wrong[:3], flush=True)
        assert fire.wrong == []
    return fire


def few() -> list[Question]:
    """One question of each kind that another process has a part in."""
    kinds = {
        "greedy",
        "greedy, streamed",
        "grammar",
        "chat, tool, streamed",
        "vectors",
        "long text",
        "no key",
    }
    return list({question.name: question for question in all_questions() if question.name in kinds}.values())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_processes_are_killed_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roles = ["grammar processes", "texts", "guard", "grammars", "engine"]
    fire = run(tmp_path, monkeypatch, few(), [roles])
    assert fire.seen["right"] > 20
    assert fire.seen["killed: engine"] == 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(11)
    fire = run(tmp_path, monkeypatch, all_questions(), rounds(chance, 100))
    assert sum(count for what, count in fire.seen.items() if what.startswith("killed")) >= 95
    assert fire.seen["right"] > 500
