"""One streamed completion from any OpenAI-compatible server, with the time of every piece."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import aiohttp


@dataclass
class StreamedRequest:
    """What came of one request. Times are those of `perf_counter`."""

    started: float
    """When it was due."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    arrivals: list[float] = field(default_factory=list)
    """When each piece of text came."""
    ended: float = 0.0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first piece."""
        return self.arrivals[0] - self.started

    @property
    def latency(self) -> float:
        """Seconds to the end."""
        return self.ended - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds per token behind the first; None where there is only one."""
        if self.output_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces, each one token or more."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


async def stream(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], due: float
) -> StreamedRequest:
    """Send `body` to `url` and read the answer as it comes; errors are part of the result."""
    result = StreamedRequest(due)
    try:
        async with session.post(url, json=body) as answer:
            if answer.status != 200:
                result.error = f"HTTP {answer.status}: {(await answer.text())[:200]}"
            else:
                await _read(answer, result)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        result.error = f"{type(error).__name__}: {error}"
    result.ended = perf_counter()
    if result.error is None and not result.arrivals:
        result.error = "the answer had no text"
    return result


async def _read(answer: aiohttp.ClientResponse, result: StreamedRequest) -> None:
    buffer = b""
    pieces = 0
    async for received in answer.content.iter_any():
        now = perf_counter()
        *events, buffer = (buffer + received).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ").strip()
            if not data or data == b"[DONE]" or data.startswith(b":"):
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                result.error = str(chunk["error"])[:200]
                return
            if any(_text(choice) for choice in chunk["choices"]):
                result.arrivals.append(now)
                pieces += 1
            if usage := chunk.get("usage"):
                result.prompt_tokens = usage["prompt_tokens"]
                result.output_tokens = usage["completion_tokens"]
    # A server without usage in streams sends a token at a time.
    result.output_tokens = result.output_tokens or pieces


def _text(choice: Mapping[str, Any]) -> str | None:
    if "text" in choice:
        # A model without a tokenizer has tokens to show, and no text.
        return choice["text"] or ("token" if choice.get("token_ids") else None)
    delta = choice.get("delta", {})
    return delta.get("content") or delta.get("reasoning_content")
