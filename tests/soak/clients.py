"""Clients and an operator of one server, for hours, at a moderate rate; quiet moments in between."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from server.imported_late import aiohttp
from server.server_process import ServerProcess

from .answers import essence, is_same, stream_put_together
from .questions import ADAPTERS, ADMIN_KEY, KEYS, NAME, Question, all_questions, as_client

MOST_KEPT = 20
"""Of wrong answers; the others are counted."""
JSON = {"Content-Type": "application/json"}


class Clients:
    """Everybody who talks to the server."""

    def __init__(self, server: ServerProcess, model: str, adapters: dict[str, str], seed: int) -> None:
        self._server, self._model, self._adapters = server, model, adapters
        self._chance = random.Random(seed)
        self._questions = all_questions()
        self._alone: dict[Question, Any] = {}
        self.counts: Counter[str] = Counter()
        self.num_wrong = 0
        self.wrong: list[dict[str, Any]] = []

    async def learn(self) -> None:
        """Asks every question alone; those answers are right ones from now on."""
        async with self._session() as http:
            for question in self._questions:
                status, self._alone[question] = await self._ask(http, question)
                if status != question.status:
                    raise AssertionError(f"{question}: {status}, {self._alone[question]}")

    async def talk(self, seconds: float, rate: float, clients: int) -> None:
        """All at once, with about so many requests a second together; every request has ended then."""
        end = time.monotonic() + seconds
        async with self._session() as http:

            async def client() -> None:
                while time.monotonic() < end:
                    await asyncio.sleep(self._chance.expovariate(rate / clients))
                    await self._one(http)

            await asyncio.gather(*(client() for _ in range(clients)), self._operator(http, end))

    async def wait_until_idle(self) -> None:
        """Nothing runs or waits any more, not even for clients that left."""
        async with self._session() as http:
            for _ in range(600):
                async with http.get("/stats") as answer:
                    engine = (await answer.json())["engine"]
                if engine["running"] == engine["waiting"] == 0:
                    return
                await asyncio.sleep(0.1)
        self._note("idle", "nothing runs or waits", engine)

    async def _one(self, http: Any) -> None:
        acts = (self._checked, self._left, self._looked)
        [act] = self._chance.choices(acts, (20, 3, 1))
        with self._surprises(act.__name__):
            await act(http)

    @contextlib.contextmanager
    def _surprises(self, what: str) -> Iterator[None]:
        try:
            yield
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            self._note(what, "an answer", f"{type(error).__name__}: {error}")

    async def _checked(self, http: Any) -> None:
        question = self._chance.choice(self._questions)
        status, answer = await self._ask(http, question)
        self.counts[question.name] += 1
        if status != question.status or not is_same(answer, self._alone[question]):
            self._note(question.name, self._alone[question], {"status": status, "answer": answer})

    async def _left(self, http: Any) -> None:
        """A client that leaves in the middle of a long answer."""
        body = {"prompt": self._chance.choice("abcdef") * 20, "max_tokens": 150, "ignore_eos": True}
        body |= {"stream": self._chance.random() < 0.5, "n": self._chance.choice([1, 1, 2])}
        body["model"] = self._chance.choice([NAME, *ADAPTERS])
        options = {
            "headers": as_client(KEYS[1]),
            "timeout": aiohttp.ClientTimeout(self._chance.uniform(0.005, 0.1)),
        }
        with contextlib.suppress(TimeoutError):
            async with http.post("/v1/completions", json=body, **options) as answer:
                async for _ in answer.content:
                    pass
        self.counts["clients that left"] += 1

    async def _looked(self, http: Any) -> None:
        for path in ("/health", "/metrics", "/stats", "/v1/models", "/"):
            async with http.get(path, headers=as_client(KEYS[0])) as answer:
                if answer.status != 200:
                    self._note(path, 200, answer.status)
                await answer.read()
        self.counts["probes"] += 1

    async def _operator(self, http: Any, end: float) -> None:
        """Acts now and then, in ways that change no answer."""
        acts = (self._slept, self._paused, self._replaced_adapter, self._rewrote_weights, self._flushed)
        while True:
            pause = self._chance.uniform(5, 20)
            if time.monotonic() + pause >= end:
                return
            await asyncio.sleep(pause)
            act = self._chance.choice(acts)
            with self._surprises(act.__name__):
                await act(http)

    async def _slept(self, http: Any) -> None:
        await self._called(http, "/sleep?level=1&mode=keep")
        await asyncio.sleep(self._chance.uniform(0, 0.5))
        await self._called(http, "/wake_up")

    async def _paused(self, http: Any) -> None:
        await self._called(http, f"/pause?mode=keep&clear_cache={self._chance.choice(['true', 'false'])}")
        await asyncio.sleep(self._chance.uniform(0, 0.5))
        await self._called(http, "/resume")

    async def _replaced_adapter(self, http: Any) -> None:
        name = self._chance.choice(ADAPTERS)
        body = {"lora_name": name, "lora_path": self._adapters[name], "load_inplace": True}
        await self._called(http, "/v1/load_lora_adapter", body)

    async def _rewrote_weights(self, http: Any) -> None:
        await self._called(http, "/update_weights_from_disk", {"model_path": self._model})

    async def _flushed(self, http: Any) -> None:
        await self._called(http, "/reset_prefix_cache")

    async def _called(self, http: Any, path: str, body: Any = None) -> None:
        async with http.post(path, json=body, headers=as_client(ADMIN_KEY)) as answer:
            said = await answer.text()
            self.counts[path.partition("?")[0]] += 1
            if answer.status != 200:
                self._note(path, 200, {"status": answer.status, "answer": said})

    async def _ask(self, http: Any, question: Question) -> tuple[int, Any]:
        headers = JSON | as_client(question.key)
        async with http.post(question.path, data=question.content, headers=headers) as answer:
            if answer.content_type == "text/event-stream":
                return answer.status, essence(await stream_put_together(answer.content))
            return answer.status, essence(json.loads(await answer.text()))

    def _note(self, what: str, expected: Any, found: Any) -> None:
        self.num_wrong += 1
        if len(self.wrong) < MOST_KEPT:
            self.wrong.append({"what": what, "expected": expected, "found": found})

    def _session(self) -> Any:
        return aiohttp.ClientSession(
            self._server.url, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(60)
        )
