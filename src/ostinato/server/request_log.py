"""Lines about requests: all of them on demand, those that were aborted always. None shows what was said."""

from __future__ import annotations

import time
from dataclasses import fields

from ostinato.engine.parameters.sampling_params import SamplingParams

from .log_lines import LimitedLines, say
from .openai.completion import Completion
from .openai.errors import ApiError
from .openai.generation import Generation

_SHOWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens")
_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}


class RequestLog:
    """Told of each generation when it begins and when it has ended."""

    def __init__(self, *, is_on: bool) -> None:
        """`is_on`: whether requests that go as they should are logged."""
        self._is_on = is_on
        self._aborts = LimitedLines("requests were aborted")

    def began(self, generation: Generation) -> None:
        """A request was let in."""
        if self._is_on:
            first = generation.completions[0]
            count = len(generation.completions)
            many = f"{count} completions, " if count > 1 else ""
            say(f"{generation.id} began: {many}{len(first.prompt_ids)} prompt tokens, {_sampling(first)}")

    def ended(self, generation: Generation) -> None:
        """A request is over, one way or another."""
        error = generation.error or next((c.error for c in generation.completions if c.error), None)
        if isinstance(error, ApiError):
            # Whoever answers with the error need not log it again, and its client learns the id.
            error.headers["X-Request-Id"] = generation.id
        why = _why_aborted(generation, error)
        if why is not None:
            self._aborts.say(f"{generation.id} aborted: {why}; {_counted(generation)}")
        elif self._is_on:
            reasons = ", ".join(sorted({c.finish_reason or "?" for c in generation.completions}))
            say(f"{generation.id} ended: {reasons}; {_counted(generation)}")


def _why_aborted(generation: Generation, error: Exception | None) -> str | None:
    if isinstance(error, ApiError):
        return str(error)
    if error is not None:
        return "the client has gone"
    if any(completion.finish_reason == "abort" for completion in generation.completions):
        return "an admin or the server ended it"
    return None


def _sampling(completion: Completion) -> str:
    params = completion.params
    shown = {name: getattr(params, name) for name in _SHOWN}
    return (
        ", ".join(f"{name} {value}" for name, value in shown.items() if value != _DEFAULTS[name]) or "plain"
    )


def _counted(generation: Generation) -> str:
    usage, first = generation.usage, generation.completions[0]
    text = f"{usage.prompt_tokens} tokens in, {usage.completion_tokens} out"
    if first.first_token_at is not None:
        text += f", first after {first.first_token_at - first.started_at:.3f} s"
    return f"{text}, {time.perf_counter() - first.started_at:.3f} s in all"
