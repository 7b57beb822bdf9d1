"""Requests of every kind at once, some of which are given up, answer as they do one by one."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from .attacks import Footprint, settled
from .imported_late import aiohttp
from .server_process import ServerProcess

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def mixed(number: int) -> tuple[str, dict[str, Any]]:
    """The path and body of a request; every kind in turn, each a little different."""
    letter, length = chr(33 + number % 90), 5 + number % 23
    completion = {"prompt": f"{number} {letter}", "max_tokens": length, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": f"{number}"}], "temperature": 0, "max_tokens": 60}
    format = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", completion),
        ("/v1/completions", {**completion, "temperature": 2.0, "seed": number}),
        ("/v1/completions", {**completion, "stop": [chr(ord(letter) + 3)], "max_tokens": 40}),
        ("/v1/completions", {**completion, "n": 3, "temperature": 2.0, "seed": number}),
        ("/v1/completions", {**completion, "logprobs": 3, "echo": True}),
        ("/v1/completions", {**completion, "presence_penalty": 1.5, "logit_bias": {"65": 5}}),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "tools": [TOOL]}),
        ("/v1/chat/completions", {**chat, "response_format": format, "seed": number, "temperature": 1.0}),
        ("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 2, "n": 2}),
        ("/v1/responses", {"input": f"{number}", "temperature": 0, "max_output_tokens": 50}),
        ("/v1/embeddings", {"input": [f"{number}", letter], "pooling": "mean"}),
        (
            "/generate",
            {"text": f"{number} {letter}", "sampling_params": {"temperature": 0, "max_new_tokens": 9}},
        ),
        ("/score", {"text_1": letter, "text_2": [f"{number}", letter]}),
    ]
    return kinds[number % len(kinds)]


IGNORED = {
    "id",
    "created",
    "created_at",
    "completed_at",
    "call_id",
    "e2e_latency",
    "cached_tokens",
    "usage_details",
}


def essence(answer: Any) -> Any:
    """What of an answer does not depend on its company; numbers as far as another batch keeps them."""
    if isinstance(answer, dict):
        return {key: essence(value) for key, value in answer.items() if key not in IGNORED}
    if isinstance(answer, list):
        return [essence(value) for value in answer]
    return round(answer, 3) if isinstance(answer, float) else answer


async def ask(client: aiohttp.ClientSession, url: str, number: int, *, streams: bool) -> Any:
    path, body = mixed(number)
    can_stream = path == "/v1/completions" and "logprobs" not in body
    if streams and can_stream:
        return await streamed(client, url + path, body)
    async with client.post(url + path, json=body) as answer:
        assert answer.status == 200, (path, body, await answer.text())
        return essence(await answer.json())


async def streamed(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    """A stream put together as the whole answer would be."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    choices = [{"index": at, "text": "", "logprobs": None} for at in range(body.get("n", 1))]
    whole: dict[str, Any] = {}
    async with client.post(url, json=asked) as answer:
        assert answer.status == 200
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                for choice in event.pop("choices"):
                    grown = choices[choice["index"]]
                    text = grown["text"] + choice["text"]
                    grown.update({**choice, "text": text})
                whole |= event
    return essence({**whole, "choices": choices})


async def give_up(client: aiohttp.ClientSession, url: str, seconds: float) -> None:
    """A request whose client leaves after a while."""
    body = {"prompt": "z", "max_tokens": 200, "temperature": 0, "stream": True}
    async with client.post(f"{url}/v1/completions", json=body) as answer:
        await asyncio.sleep(seconds)
        answer.close()


async def together(url: str, count: int, one_by_one: list[Any]) -> None:
    chance = random.Random(count)
    numbers = list(range(count))
    chance.shuffle(numbers)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(200)) as client:
        aborted = [give_up(client, url, chance.uniform(0, 0.5)) for _ in range(count // 8)]
        asked = [ask(client, url, number, streams=chance.random() < 0.5) for number in numbers]
        found = await asyncio.gather(*asked, *aborted)
    for number, answer in zip(numbers, found[:count], strict=True):
        assert answer == one_by_one[number], mixed(number)


async def alone(url: str, count: int) -> list[Any]:
    async with aiohttp.ClientSession() as client:
        return [await ask(client, url, number, streams=False) for number in range(count)]


def check_usage(answer: Any) -> None:
    """Counts that can be known: those of a prompt without special tokens are its characters."""
    usage = answer.get("usage")
    if usage and "completion_tokens" in usage:
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def run_mixed(server: ServerProcess, count: int) -> None:
    one_by_one = asyncio.run(alone(server.url, count))
    for number, answer in enumerate(one_by_one):
        check_usage(answer)
        path, body = mixed(number)
        if path == "/v1/completions":
            assert answer["usage"]["prompt_tokens"] == len(body["prompt"])
            if "stop" not in body and not body["temperature"]:
                assert answer["usage"]["completion_tokens"] == body["max_tokens"] * body.get("n", 1)
    asyncio.run(together(server.url, count, one_by_one))
    server.wait_until_idle()


def test_mixed_requests_at_once_answer_as_one_by_one(server: ServerProcess) -> None:
    run_mixed(server, 42)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_mixed_requests_with_preemptions(model: Path) -> None:
    """So few pages that requests are put back."""
    with ServerProcess(model, "--num-pages", "20") as server:
        run_mixed(server, 200)
        preemptions = server.engine_statistics()["preemptions"]
        print("preemptions:", preemptions)
        assert preemptions


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_thousand_requests_without_growth(model: Path) -> None:
    async def soak(url: str, count: int) -> None:
        gate = asyncio.Semaphore(64)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(120)) as client:

            async def one(number: int) -> None:
                async with gate:
                    if number % 20 == 19:
                        await give_up(client, url, 0.02)
                    else:
                        await ask(client, url, number % 280, streams=number % 2 == 0)

            await asyncio.gather(*(one(number) for number in range(count)))

    with ServerProcess(model) as server:
        asyncio.run(soak(server.url, 4000))
        server.wait_until_idle()
        before = Footprint.of(server)
        for _ in range(4):
            asyncio.run(soak(server.url, 4000))
            server.wait_until_idle()
            print(Footprint.of(server))
        print("after 4,000:", before, "after 20,000:", settled(server, before, 30))
