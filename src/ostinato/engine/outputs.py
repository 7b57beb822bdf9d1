"""Outputs of requests, with vLLM's names and structure."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from .adapters.lora_request import LoRARequest
from .scheduling.request_drafts import RequestDrafts


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class TextSoFar(Protocol):
    """A text that is decoded when it is read."""

    @property
    def text(self) -> str:
        """The whole text."""

    def since(self, start: int) -> str:
        """The text after the first `start` characters; the cost depends on its length only."""


class TextInTheMaking(TextSoFar, Protocol):
    """A growing text; `text` is what there is so far."""

    def so_far(self) -> TextSoFar:
        """The text as it is now; does not change later."""


class ReadLater:
    """Base of classes with fields that are computed on first read. The class must not assign them a value."""

    def read_later(self, **makers: Callable[[], Any]) -> None:
        """Compute these fields when they are read, by functions that may be called more than once."""
        for name in makers:
            self.__dict__.pop(name, None)
        self.__dict__["_makers"] = makers

    def __getattr__(self, name: str) -> Any:  # called only for attributes that are not there
        make = self.__dict__.get("_makers", {}).get(name)
        if make is None:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        made = self.__dict__[name] = make()
        return made

    def __getstate__(self) -> dict[str, Any]:
        # A copy has every field, as it is now.
        names = [entry.name for entry in fields(self)]  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class GrowingText:
    """A field that reads as a text; it may be set to a text or to a `TextSoFar`."""

    def __set_name__(self, kind: type, name: str) -> None:
        self._kept_as = f"_{name}"

    def __get__(self, output: object | None, kind: type) -> str:
        kept = "" if output is None else getattr(output, self._kept_as)
        return kept if isinstance(kept, str) else kept.text

    def __set__(self, output: object, text: str | TextSoFar) -> None:
        setattr(output, self._kept_as, text)


@dataclass
class CompletionOutput(ReadLater):
    """One completion of a request."""

    index: int
    text: GrowingText = GrowingText()
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = field(default_factory=lambda: None)  # see ReadLater
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error`; None while it runs."""
    stop_reason: int | str | None = None
    """The stop token or string that ended it, if one did."""

    @property
    def cumulative_logprob(self) -> float | None:
        """Log probability of all tokens together; None if no logprobs were requested."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=False)
        return sum(found[token].logprob for token, found in pairs)

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    def text_since(self, start: int) -> str:
        """The text after the first `start` characters.

        The cost depends on its length only, so showing a long text piece by piece reads all of it once.
        """
        kept: str | TextSoFar = self.__dict__["_text"]
        return kept[start:] if isinstance(kept, str) else kept.since(start)

    def snapshot(self) -> CompletionOutput:
        """A copy that does not change while this one grows. Takes the same time for any length.

        Lists are only ever appended to, so the copy records their lengths and is built when it is read.
        """
        taken = CompletionOutput(self.index, finish_reason=self.finish_reason, stop_reason=self.stop_reason)
        kept: str | TextInTheMaking = self.__dict__["_text"]
        taken.text = kept if isinstance(kept, str) else kept.so_far()  # type: ignore[assignment]
        token_ids, logprobs = self.token_ids, self.logprobs
        if self.finish_reason is not None:
            taken.token_ids, taken.logprobs = token_ids, logprobs
            return taken
        makers: dict[str, Callable[[], Any]] = {"token_ids": _beginning(token_ids)}
        if logprobs is not None:
            makers["logprobs"] = _beginning(logprobs)
        taken.read_later(**makers)
        return taken


def _beginning(listed: list[Any]) -> Callable[[], list[Any]]:
    length = len(listed)
    return lambda: listed[:length]


@dataclass
class RequestOutput(ReadLater):
    """A request and its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Log probabilities per prompt token, None for the first; None if they were not requested."""
    num_cached_tokens: int = 0
    """Number of prompt tokens whose KV was found in the prefix cache."""
    error: str | None = None
    """Why the request was refused or failed, if it was."""
    metrics: RequestTimes | None = None
    """When the request arrived, started and ended; None if it was refused."""
    lora_request: LoRARequest | None = None
    """The requested adapter."""

    def snapshot(self) -> RequestOutput:
        """A copy that does not change while this one grows. Takes the same time for any length."""
        taken = RequestOutput(
            self.request_id,
            self.prompt,
            [],
            [output.snapshot() for output in self.outputs],
            self.prompt_logprobs,  # replaced, never written to, when a part of the prompt is computed
            self.num_cached_tokens,
            self.error,
            self.metrics,
            self.lora_request,
        )
        taken.read_later(prompt_token_ids=lambda: self.prompt_token_ids)
        return taken

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return None not in [output.finish_reason for output in self.outputs]


@dataclass
class RequestTimes:
    """Under vLLM's names, current and earlier ones. `..._ts` are from a monotonic clock, `..._time` are
    seconds since 1970; 0 and None mean that it has not happened yet."""

    arrival_time: float = field(default_factory=time.time)
    queued_ts: float = field(default_factory=time.monotonic)
    """When it arrived."""
    scheduled_ts: float = 0.0
    """When its first step began."""
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    """When it ended; 0 while it runs."""
    num_generation_tokens: int = 0
    """Over all its completions; counted when it ends."""
    speculative_decoding: RequestDrafts | None = None
    """Counts of drafts over its completions that have ended; None: there were none."""

    @property
    def first_token_latency(self) -> float:
        """Seconds from arrival to the first token."""
        return max(0.0, self.first_token_ts - self.queued_ts) if self.first_token_ts else 0.0

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step."""
        return self.scheduled_ts - self.queued_ts if self.scheduled_ts else None

    @property
    def first_scheduled_time(self) -> float | None:
        """When its first step began."""
        return self._as_time(self.scheduled_ts)

    @property
    def first_token_time(self) -> float | None:
        """When its first token came."""
        return self._as_time(self.first_token_ts)

    @property
    def last_token_time(self) -> float | None:
        """When its last token came."""
        return self._as_time(self.last_token_ts)

    @property
    def finished_time(self) -> float | None:
        """When it ended."""
        return self._as_time(self.last_token_ts)

    def _as_time(self, stamp: float) -> float | None:
        return self.arrival_time + stamp - self.queued_ts if stamp else None
