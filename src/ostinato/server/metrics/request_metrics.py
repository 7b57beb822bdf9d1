"""What the HTTP process measures about requests."""

from __future__ import annotations

from collections import Counter
from time import perf_counter

from ..openai.completion import Completion
from .histogram import Histogram

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.75, 1, 2.5)
WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NUMBERS = (1, 2, 5, 10, 20)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class RequestMetrics:
    """Counters and histograms over completions, in seconds and tokens."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(FIRST_TOKEN)
        self.inter_token_latency = Histogram(PER_TOKEN, recent=8192)
        self.time_per_output_token = Histogram(PER_TOKEN)
        self.end_to_end = Histogram(WHOLE)
        self.queue_time = Histogram(WHOLE)
        self.prefill_time = Histogram(WHOLE)
        self.decode_time = Histogram(WHOLE)
        self.inference_time = Histogram(WHOLE)
        self.prompt_lengths = Histogram(LENGTHS)
        self.generation_lengths = Histogram(LENGTHS)
        self.computed_lengths = Histogram(LENGTHS)
        """Of the prompts, what was not in the prefix cache."""
        self.max_tokens = Histogram(LENGTHS)
        """That requests asked for."""
        self.n = Histogram(NUMBERS)
        self.step_tokens = Histogram(STEP)
        """Tokens that a step brought: the prompts that it finished, and one for each answer."""
        self._step_tokens = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        """Completions by finish reason."""
        self.answers: Counter[tuple[str, int]] = Counter()
        """HTTP answers by endpoint and status."""
        self.rejected = 0
        """Requests refused because the queue was full."""

    def on_token(self, completion: Completion, seconds: float) -> None:
        """A completion got a token, `seconds` after the one before or after its start."""
        self.generation_tokens += 1
        self._step_tokens += 1
        if completion.num_received > 1:
            self.inter_token_latency.observe(seconds)
            return
        self.time_to_first_token.observe(seconds)
        self.prompt_tokens += len(completion.prompt_ids)
        self._step_tokens += len(completion.prompt_ids)
        self.cached_tokens += completion.num_cached_tokens

    def on_step(self) -> None:
        """All news of a step have come."""
        if self._step_tokens:
            self.step_tokens.observe(self._step_tokens)
            self._step_tokens = 0

    def observe(self, completion: Completion, *, n: int = 1) -> None:
        """One of the `n` completions of a prompt has ended, one way or another."""
        self.finished[completion.finish_reason or "abort"] += 1
        first, last = completion.first_token_at, completion.last_token_at
        if first is None or last is None:
            return
        began = completion.started_at
        self.end_to_end.observe(perf_counter() - began)
        queued = min(completion.queued_seconds, first - began)
        self.queue_time.observe(queued)
        self.prefill_time.observe(first - began - queued)
        self.decode_time.observe(last - first)
        self.inference_time.observe(last - began - queued)
        self.prompt_lengths.observe(len(completion.prompt_ids))
        self.computed_lengths.observe(len(completion.prompt_ids) - completion.num_cached_tokens)
        self.generation_lengths.observe(completion.num_tokens)
        self.max_tokens.observe(completion.params.max_tokens or 0)
        self.n.observe(n)
        if completion.num_received > 1:
            self.time_per_output_token.observe((last - first) / (completion.num_received - 1))
