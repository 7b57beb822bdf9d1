"""One streamed completion from any OpenAI-compatible server, with the arrival time of every piece."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from .streaming_client import ConnectionBroken, StreamingClient


@dataclass
class StreamedRequest:
    """The outcome of one request. Times are those of `perf_counter`."""

    started: float
    """When it was due."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    arrivals: list[float] = field(default_factory=list)
    """When each piece of text arrived."""
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
        """Seconds per token after the first; None if there is only one."""
        if self.output_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces, each one token or more."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


async def stream(client: StreamingClient, path: str, body: bytes, due: float) -> StreamedRequest:
    """Send a JSON body and read the answer as it arrives; errors are part of the result."""
    result = StreamedRequest(due)
    events = _Events(result)
    try:
        status = await client.post(path, body, events.take_in)
        if status != 200:
            result.error = f"HTTP {status}: {events.beginning.decode(errors='replace')[:200]}"
    except ConnectionBroken as error:
        result.error = str(error)
    result.ended = perf_counter()
    # A server that sends no usage in streams sends one token at a time.
    result.output_tokens = result.output_tokens or len(result.arrivals)
    if result.error is None and not result.arrivals:
        result.error = "the answer had no text"
    return result


class _Events:
    """Reads server-sent events from the pieces of a body."""

    def __init__(self, result: StreamedRequest) -> None:
        self.beginning = b""
        """The beginning of the body, for error messages."""
        self._result = result
        self._rest = b""

    def take_in(self, piece: bytes) -> None:
        """Process the next piece; it may end anywhere."""
        now = perf_counter()
        if len(self.beginning) < 1000:
            self.beginning += piece
        *events, self._rest = (self._rest + piece).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ").strip()
            if data and data != b"[DONE]" and not data.startswith(b":"):
                self._take_in_event(data, now)

    def _take_in_event(self, data: bytes, now: float) -> None:
        result = self._result
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                result.error = str(chunk["error"])[:200]
                return
            if any(_text(choice) for choice in chunk["choices"]):
                result.arrivals.append(now)
            if usage := chunk.get("usage"):
                result.prompt_tokens = usage["prompt_tokens"]
                result.output_tokens = usage["completion_tokens"]
        except (ValueError, KeyError, TypeError) as error:
            result.error = f"an event is not a chunk of a completion ({type(error).__name__}): {data[:100]!r}"


def _text(choice: Mapping[str, Any]) -> str | None:
    if "text" in choice:
        # A model without a tokenizer returns tokens but no text.
        return choice["text"] or ("token" if choice.get("token_ids") else None)
    delta = choice.get("delta", {})
    return delta.get("content") or delta.get("reasoning_content")
