"""What a caller gets back, in the shape vLLM's users know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class TextInTheMaking(Protocol):
    """A text that grows; made when it is read."""

    @property
    def text(self) -> str:
        """As far as it goes."""


class GrowingText:
    """A field that is read as a text, and set to one or to something that has one at any time."""

    def __set_name__(self, kind: type, name: str) -> None:
        self._kept_as = f"_{name}"

    def __get__(self, output: object | None, kind: type) -> str:
        kept = "" if output is None else getattr(output, self._kept_as)
        return kept if isinstance(kept, str) else kept.text

    def __set__(self, output: object, text: str | TextInTheMaking) -> None:
        setattr(output, self._kept_as, text)


@dataclass
class CompletionOutput:
    """One of a request's completions."""

    index: int
    text: GrowingText = GrowingText()
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error`; None while it runs."""
    stop_reason: int | str | None = None
    """The stop token or string that ended it, if one did."""

    def snapshot(self) -> CompletionOutput:
        """A copy that stays as it is while this one grows."""
        logprobs = None if self.logprobs is None else self.logprobs.copy()
        reasons = self.finish_reason, self.stop_reason
        return CompletionOutput(self.index, self.text, self.token_ids.copy(), logprobs, *reasons)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of one that grows has the text as it is now.
        return {**self.__dict__, "_text": self.text}


@dataclass
class RequestOutput:
    """A request and its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Per prompt token, None for the first; None if not asked for."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was found in the prefix cache."""
    error: str | None = None
    """Why the request was refused or failed, if it was."""

    def snapshot(self) -> RequestOutput:
        """A copy that stays as it is while this one grows."""
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            [output.snapshot() for output in self.outputs],
            None if self.prompt_logprobs is None else self.prompt_logprobs.copy(),
            self.num_cached_tokens,
            self.error,
        )

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return None not in [output.finish_reason for output in self.outputs]


@dataclass(frozen=True)
class EmbeddingOutput:
    """A prompt as one vector."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: list[float]
    """Empty where `error` says why."""
    error: str | None = None
    """Why the request was refused or failed, if it was."""
