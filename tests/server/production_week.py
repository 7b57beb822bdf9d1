"""What a server lives through in production, in minutes: clients of every kind, good and bad, and operators.

Answers are compared with those of a plain engine (`engine.asked_alone`) wherever one is known: neither
weights nor the adapter changed, nor did anything fail, between question and answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from engine.asked_alone import Question
from engine.everything_world import World
from ostinato import SamplingParams
from ostinato.text.structured import StructuredOutputs

from .imported_late import aiohttp, openai
from .server_process import ServerProcess

NAMES = ("sql", "law")
BUSY = (409, 429, 503)
"""Answers that a client of a busy or sleeping server has to expect."""
FLAGS = (
    *("--max-running-requests", "6", "--num-pages", "16", "--max-model-len", "96"),
    *("--chunked-prefill-size", "16", "--cuda-graph-bs", "1,6", "--cuda-graph-prefill-tokens", "8,16"),
    *(
        "--enable-lora",
        "--max-loras",
        "1",
        "--max-cpu-loras",
        "1",
        "--max-lora-rank",
        "8",
        "--enable-sleep-mode",
        "--hostile-wake",
    ),
    *("--steps-ahead", "1", "--cuda-graph-mode", "full", "--dtype", "float32", "--client-timeout", "5"),
    "--speculative-config",
    '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}',
)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.9, "seed": 4},
    "filtered": {"temperature": 1.2, "seed": 2, "top_k": 20, "top_p": 0.9},
    "penalised": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    "biased": {"logit_bias": {"5": 6.0, "9": 6.5}},
    "stop strings": {"stop": ["e", "Q", "12"], "temperature": 1.0, "seed": 8},
    "stop tokens": {"stop_token_ids": [0, 5, 10, 15, 20, 25, 30], "temperature": 1.0, "seed": 6},
    "digits": {"guided_regex": "[0-9]{1,9}"},
}


def params_of(kind: str, tokens: int) -> SamplingParams:
    """The same in the engine's own words."""
    asked = {"temperature": 0.0, "max_tokens": tokens, **KINDS[kind]}
    if "guided_regex" in asked:
        asked["structured_outputs"] = StructuredOutputs(regex=asked.pop("guided_regex"))
    if "logit_bias" in asked:
        asked["logit_bias"] = {int(token): bias for token, bias in asked["logit_bias"].items()}
    return SamplingParams(**asked)


@dataclass
class State:
    """What a client has to know of the server to know its answer."""

    weights: int = 0
    epoch: int = 0
    """Counts all that changes answers; odd while something changes."""
    contents: dict[str, int] = field(default_factory=dict)


@dataclass
class Week:
    """One server under everybody."""

    server: ServerProcess
    world: World
    other_weights: str
    chance: random.Random
    state: State = field(default_factory=State)
    seen: Counter[str] = field(default_factory=Counter)
    expected: list[tuple[str, str, Question]] = field(default_factory=list)
    """What was answered, how it was asked, and the question."""

    async def live(self, seconds: float, clients: int = 8) -> None:
        """Everybody at once."""
        end = time.monotonic() + seconds
        timeout = aiohttp.ClientTimeout(120)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self.server.url, connector=connector, timeout=timeout) as http:
            customers: list[Callable[[Any], Awaitable[None]]] = [
                self.whole_answer,
                self.whole_answer,
                self.stream,
                self.stream,
                self.slow_stream,
                self.official_client,
                self.several,
                self.vectors,
                self.chat,
                self.leave_early,
                self.leave_at_once,
                self.garbage,
                self.huge_body,
                self.idle_connections,
                self.look_around,
            ]

            async def repeat(what: list[Any], pause: float) -> None:
                while time.monotonic() < end:
                    await self.chance.choice(what)(http)
                    await asyncio.sleep(self.chance.uniform(0, pause))

            operator = [self.sleep, self.release, self.pause, self.update, self.load, self.flush, self.unload]
            await asyncio.gather(*(repeat(customers, 0.1) for _ in range(clients)), repeat(operator, 5.0))
            await self.everything_on(http)

    # -- customers ---------------------------------------------------------------------------------

    def question(self) -> tuple[str, dict[str, Any], Question]:
        kind, prompt = self.chance.choice(list(KINDS)), self.chance.choice(self.world.prompts)
        name = self.chance.choice([None, None, *self.state.contents])
        tokens = self.chance.randint(1, 24)
        body = {
            "model": name or "scripted",
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0.0,
            **KINDS[kind],
        }
        contents = None if name is None else self.state.contents[name]
        return kind, body, Question(prompt, params_of(kind, tokens), contents, self.state.weights)

    def keep(self, how: str, text: str, question: Question, epoch: int) -> None:
        """Compare later, if nothing has changed meanwhile."""
        self.seen[how] += 1
        if epoch == self.state.epoch and not epoch % 2:
            self.expected.append((text, how, question))

    async def whole_answer(self, http: Any) -> None:
        epoch, (kind, body, question) = self.state.epoch, self.question()
        async with http.post("/v1/completions", json=body) as answer:
            if self.refused(answer.status, await answer.text(), epoch):
                return
            [choice] = (await answer.json())["choices"]
        if choice["finish_reason"] != "abort":
            self.keep(f"whole {kind}", choice["text"], question, epoch)

    async def stream(self, http: Any, wait: float = 0.0) -> None:
        epoch, (kind, body, question) = self.state.epoch, self.question()
        async with http.post("/v1/completions", json={**body, "stream": True}) as answer:
            if self.refused(answer.status, "" if answer.status == 200 else await answer.text(), epoch):
                return
            text, reason, is_done = "", None, False
            async for event in events(answer):
                if wait:
                    await asyncio.sleep(wait)
                if event is None:
                    is_done = True
                elif "error" in event:
                    assert epoch != self.state.epoch, event
                    self.seen["stream broken off"] += 1
                    return
                else:
                    for choice in event["choices"]:
                        text, reason = text + choice["text"], choice["finish_reason"] or reason
        assert is_done, "a stream ended without [DONE]"
        assert reason is not None
        if reason != "abort":
            self.keep(f"stream {kind}", text, question, epoch)

    async def slow_stream(self, http: Any) -> None:
        await self.stream(http, wait=0.05)

    async def official_client(self, http: Any) -> None:
        epoch, (kind, body, question) = self.state.epoch, self.question()
        own = {"top_k", "stop_token_ids", "guided_regex"}
        extra = {key: body.pop(key) for key in own & body.keys()}
        async with openai.AsyncOpenAI(
            base_url=f"{self.server.url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            try:
                found = await client.completions.create(**body, extra_body=extra, stream=True)
                text, reason = "", None
                async for chunk in found:
                    for choice in chunk.choices:
                        text, reason = text + choice.text, choice.finish_reason or reason
            except openai.APIStatusError as error:
                self.refused(error.status_code, str(error), epoch)
                return
            except openai.APIError:
                if epoch == self.state.epoch:
                    raise
                return
        if reason != "abort":
            self.keep(f"official {kind}", text, question, epoch)

    async def several(self, http: Any) -> None:
        epoch, (_, body, _) = self.state.epoch, self.question()
        body |= {"n": 3, "temperature": 1.0, "seed": 12}
        async with http.post("/v1/completions", json=body) as answer:
            if not self.refused(answer.status, await answer.text(), epoch):
                assert len((await answer.json())["choices"]) == 3
                self.seen["several"] += 1

    async def vectors(self, http: Any) -> None:
        epoch, prompt = self.state.epoch, self.chance.choice(self.world.prompts)
        async with http.post("/v1/embeddings", json={"input": list(prompt)}) as answer:
            if not self.refused(answer.status, await answer.text(), epoch):
                [found] = (await answer.json())["data"]
                assert abs(sum(x * x for x in found["embedding"]) - 1) < 1e-3
                self.seen["vectors"] += 1

    async def chat(self, http: Any) -> None:
        epoch = self.state.epoch
        words = self.chance.choice(["Hello", "¿Qué?", "a" * 60, "x" * 400])
        body = {"messages": [{"role": "user", "content": words}], "max_tokens": 9, "logprobs": True}
        async with http.post("/v1/chat/completions", json=body) as answer:
            text = await answer.text()
            if len(words) > 90 or not words.isascii():
                assert answer.status in (200, 400, *BUSY), (words, answer.status, text)
            elif not self.refused(answer.status, text, epoch):
                [choice] = json.loads(text)["choices"]
                assert choice["logprobs"]["content"] or choice["finish_reason"] == "abort"
            self.seen["chat"] += 1

    async def leave_early(self, http: Any) -> None:
        _, body, _ = self.question()
        body |= {"stream": True, "max_tokens": 40, "ignore_eos": True}
        with contextlib.suppress(asyncio.TimeoutError):
            async with http.post(
                "/v1/completions", json=body, timeout=aiohttp.ClientTimeout(self.chance.uniform(0.01, 0.5))
            ) as answer:
                async for _ in answer.content:
                    pass
        self.seen["left early"] += 1

    async def leave_at_once(self, http: Any) -> None:
        _, body, _ = self.question()
        content = json.dumps({**body, "n": 2, "temperature": 1.0}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        await self.raw(
            b"%sContent-Length: %d\r\n\r\n%s"
            % (head, len(content), content[: self.chance.choice([0, 20, len(content)])])
        )
        self.seen["left at once"] += 1

    async def garbage(self, http: Any) -> None:
        await self.raw(
            self.chance.choice([b"\x00\xff" * 500, b"GET / HTTP/9\r\n\r\n", b"POST /v1", b"\r\n" * 50])
        )
        bodies = [b"{", b'{"prompt": "a", "max_tokens": 1e99}', b'{"prompt": "\\ud800"}', b"[" * 5000]
        body, headers = self.chance.choice(bodies), {"Content-Type": "application/json"}
        async with http.post("/v1/completions", data=body, headers=headers) as answer:
            assert answer.status in (400, 422), (body, answer.status, await answer.text())
            assert "error" in await answer.json()
        self.seen["garbage"] += 1

    async def huge_body(self, http: Any) -> None:
        size = self.chance.choice([1, 7, 9])
        body = json.dumps({"prompt": "a " * (size * 2**19), "max_tokens": 1}).encode()
        with contextlib.suppress(aiohttp.ClientError):
            async with http.post(
                "/v1/completions", data=body, headers={"Content-Type": "application/json"}
            ) as answer:
                assert answer.status in (400, 413), (answer.status, await answer.text())
        self.seen["huge"] += 1

    async def idle_connections(self, http: Any) -> None:
        opened = [await asyncio.open_connection("127.0.0.1", self.server.port) for _ in range(30)]
        await asyncio.sleep(self.chance.uniform(0, 1))
        for _, writer in opened:
            writer.close()
        self.seen["idle connections"] += 1

    async def look_around(self, http: Any) -> None:
        for path in ("/health", "/metrics", "/stats", "/v1/models", "/graphs"):
            began = time.monotonic()
            async with http.get(path) as answer:
                assert answer.status == 200, (path, answer.status)
                await answer.read()
            self.seen["slowest look, ms"] = max(
                self.seen["slowest look, ms"], round(1000 * (time.monotonic() - began))
            )

    async def raw(self, content: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        with contextlib.suppress(OSError):
            writer.write(content)
            await writer.drain()
            if self.chance.random() < 0.5:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(reader.read(100), 0.3)
        writer.close()

    def refused(self, status: int, text: str, epoch: int) -> bool:
        """Whether there is no answer, for a reason that is one."""
        if status == 200:
            return False
        is_disturbed = epoch != self.state.epoch or epoch % 2
        assert is_disturbed, (status, text)
        assert status in (*BUSY, 404) or "is not loaded" in text, (status, text)
        self.seen[f"refused {status}"] += 1
        return True

    # -- operators ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        self.state.epoch += 1
        assert self.state.epoch % 2
        try:
            yield
        finally:
            self.state.epoch += 1

    async def called(self, http: Any, path: str, body: Any = None) -> Any:
        async with http.post(path, json=body) as answer:
            text = await answer.text()
            assert answer.status == 200, (path, body, answer.status, text)
            self.seen[path.split("?")[0]] += 1
            return text

    async def sleep(self, http: Any) -> None:
        level, mode = self.chance.choice([1, 1, 2]), self.chance.choice(["keep", "keep", "abort", "wait"])
        async with self.changing():
            await self.called(http, f"/sleep?level={level}&mode={mode}")
            await asyncio.sleep(self.chance.uniform(0, 0.5))
            if self.chance.random() < 0.5:
                await self.called(http, "/wake_up?tags=weights")
            else:
                await self.called(http, "/wake_up")
            if level == 2:
                await self.write(http, self.state.weights)
            await self.called(http, "/wake_up")

    async def release(self, http: Any) -> None:
        """As SGLang's trainers do it, some tags at a time, with new weights before the KV cache is back."""
        tags = self.chance.choice([["kv_cache"], ["weights"], ["kv_cache", "weights"], None])
        async with self.changing():
            await self.called(http, "/release_memory_occupation", {} if tags is None else {"tags": tags})
            await asyncio.sleep(self.chance.uniform(0, 0.5))
            await self.called(http, "/resume_memory_occupation", {"tags": ["weights"]})
            self.state.weights = self.chance.randrange(2)
            await self.write(http, self.state.weights)
            await self.called(http, "/resume_memory_occupation", {})

    async def pause(self, http: Any) -> None:
        mode, clears = self.chance.choice(["keep", "abort", "wait"]), self.chance.choice(["true", "false"])
        async with self.changing():
            await self.called(http, f"/pause?mode={mode}&clear_cache={clears}")
            await asyncio.sleep(self.chance.uniform(0, 0.5))
            await self.called(http, "/resume")

    async def update(self, http: Any) -> None:
        async with self.changing():
            self.state.weights = self.chance.randrange(2)
            await self.write(http, self.state.weights)

    async def write(self, http: Any, weights: int) -> None:
        path = self.other_weights if weights else self.world.directory
        await self.called(http, "/update_weights_from_disk", {"model_path": path})

    async def load(self, http: Any) -> None:
        name, contents = self.chance.choice(NAMES), self.chance.randrange(4)
        async with self.changing():
            body = {"lora_name": name, "lora_path": self.world.adapters[contents], "load_inplace": True}
            await self.called(http, "/v1/load_lora_adapter", body)
            self.state.contents[name] = contents

    async def unload(self, http: Any) -> None:
        name = self.chance.choice(NAMES)
        async with self.changing():
            async with http.post("/v1/unload_lora_adapter", json={"lora_name": name}) as answer:
                if answer.status == 200:
                    del self.state.contents[name]
                else:
                    assert answer.status == (400 if name in self.state.contents else 404), await answer.text()

    async def flush(self, http: Any) -> None:
        await self.called(http, "/reset_prefix_cache")

    async def everything_on(self, http: Any) -> None:
        await self.called(http, "/wake_up")
        await self.called(http, "/resume")

    def judge(self) -> int:
        """Compare what can be known; how many answers that were."""
        for text, how, question in self.expected:
            assert text == self.world.alone.says(question).text, (how, question)
        return len(self.expected)


async def events(answer: Any) -> AsyncIterator[dict[str, Any] | None]:
    """Those of a stream; None is [DONE]."""
    async for line in answer.content:
        if line.startswith(b"data: "):
            yield None if line[6:].strip() == b"[DONE]" else json.loads(line[6:])


def write_other_weights(world: World, place: Path) -> str:
    """The second set of weights as a checkpoint."""
    place.mkdir()
    (place / "config.json").write_text((Path(world.directory) / "config.json").read_text())
    save_file(
        {name: tensor.contiguous() for name, tensor in world.weights[1].items()}, place / "model.safetensors"
    )
    return str(place)
