"""What a caller gets back, in the shape vLLM's users know."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One of a request's completions."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error`; None while it runs."""
    stop_reason: int | str | None = None
    """The stop token or string that ended it, if one did."""


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

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(output.finish_reason is not None for output in self.outputs)


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
